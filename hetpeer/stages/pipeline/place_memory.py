"""Memory of a place: what it takes on the device, in main memory and on the disk, by kind of offload.

This is the one formula for all who count: coordinator, volunteer, planner and `hetpeer inspect`. Pure; the
tables are in docs/memory.md. What only the update needs may leave the device (HPS, section 4.4).

A volunteer that computes on the processor has one memory. It counts as the device's, and there is no other.

    demand = PlaceDemand(numbers=335_000_000, activations=1 << 30)
    offered = Offered(device=8 << 30, host=16 << 30, disk=20 << 30, kinds=kinds_of("auto"))
    choose(demand, offered).kind  # Offload.HOST
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.gradient_slots import LIVE

NUMBER: Final = 4
"""Bytes of a float32 number, as in masters, slots and what the optimizer keeps."""
HALF: Final = NUMBER - 2
"""Bytes that a bfloat16 number saves."""
IN_FLIGHT: Final = 4
"""Microbatches whose activations a place that is offered to a newcomer has memory for."""
IN_MEMORY: Final = {Offload.NONE: 2, Offload.HOST: 2, Offload.DISK: 1}
"""Sums of a step and block in memory at most: slots, and in place of one the sum that a reduce makes. The
others lie in the scratch file.
"""
GAPS: Final = 8
PAGES: Final = 1 << 16
"""The scratch file has an eighth of its part for gaps, and 16 pages for the ends of each block's vectors."""
CHOICES: Final = {"auto": tuple(Offload), **{kind.value: (kind,) for kind in Offload}}
"""What an owner may choose → the kinds that this allows, in the order in which they are tried."""


def kinds_of(choice: str) -> tuple[Offload, ...]:
    """The kinds that `choice` allows; NONE alone if it is no key of CHOICES, as a peer may say anything."""
    return CHOICES.get(choice, (Offload.NONE,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes on the device, in main memory beside it, and on the disk."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes in all three."""
        return self.device + self.host + self.disk

    def times(self, count: int) -> Room:
        """`count` times as much."""
        return Room(device=self.device * count, host=self.host * count, disk=self.disk * count)

    def beyond(self, offered: Offered) -> Room:
        """Bytes by which this is more than is `offered`, memory by memory."""
        return Room(
            device=max(self.device - offered.device, 0),
            host=max(self.host - offered.host, 0),
            disk=max(self.disk - offered.disk, 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """What a run keeps of each parameter, beside weights, gradient and one step's slots."""

    kept: int = 2
    """Float32 numbers that only the update needs: the optimizer's, and others of the run."""
    behind: int = 0
    """Further steps that may be under way: each has its own weights and slots."""
    means: int = 0
    """Weights of means that are installed among such steps."""
    in_state: int = 3
    """Float32 numbers in a state. With a scratch file the disk also has room for a copy of each state."""

    @property
    def computing(self) -> int:
        """Numbers that compute uses: weights of each step and mean, and the gradient."""
        return 2 + self.behind + self.means

    def each(self, kind: Offload, *, apart: bool, spills: bool = True) -> Room:
        """Bytes for one parameter in float32.

        `apart`: the device has a memory of its own, as a GPU has. `spills`: sums beyond those of IN_MEMORY
        are in the scratch file; otherwise they are where the other slots are, and no disk is counted on.

        The sum that a reduce makes arrives in main memory. A sole holder has none, but another one may come
        at any time.
        """
        away = runs_away(kind, apart=apart)
        beside = 1 if apart and not away else 0  # a sum that is not where the slots are
        sums = LIVE * (1 + self.behind) + 1 - beside
        spilled = sums - IN_MEMORY[kind] * (1 + self.behind) if spills or kind is Offload.DISK else 0
        update = self.updated(kind, apart=apart)
        filed = update if kind is Offload.DISK else 0
        memory = NUMBER * (sums - spilled) + update - filed
        return Room(
            device=NUMBER * self.computing + (0 if away else memory),
            host=memory if away else NUMBER * beside,
            disk=NUMBER * (spilled + self.in_state) + filed if spilled else 0,
        )

    def updated(self, kind: Offload, *, apart: bool) -> int:
        """Bytes that an update reads and writes for one parameter: what is kept, and masters."""
        return NUMBER * (self.kept + runs_away(kind, apart=apart))


def runs_away(kind: Offload, *, apart: bool) -> bool:
    """Whether the update runs in another memory than compute: weights on the device are copies then."""
    return apart and kind is not Offload.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What an owner offers to a place, in bytes. `host` 0: the device's memory is main memory."""

    device: int
    host: int = 0
    disk: int = 0
    """For the scratch file, copies of states, and bundles that memory has no room for."""
    kinds: tuple[Offload, ...] = (Offload.NONE,)
    """Allowed kinds, the best first."""

    @property
    def room(self) -> Room:
        """The three memories."""
        return Room(device=self.device, host=self.host, disk=self.disk)

    @property
    def apart(self) -> bool:
        """Whether the device has a memory of its own."""
        return self.host > 0

    def ways(self) -> Iterator[tuple[Offload, bool]]:
        """(kind, whether slots spill) in the order in which they are tried.

        Slots that the file has no room for stay in memory (docs/memory.md). HOST is NONE where there is but
        one memory.
        """
        for kind in self.kinds if self.apart else dict.fromkeys(map(_in_one_memory, self.kinds)):
            if self.disk or self.kinds == (Offload.DISK,):
                yield kind, True
            if kind is not Offload.DISK:
                yield kind, False


def _in_one_memory(kind: Offload) -> Offload:
    return Offload.NONE if kind is Offload.HOST else kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDemand:
    """What blocks take at a holder."""

    numbers: int = 0
    """Elements of their vectors: parameters and running statistics."""
    halved: int = 0
    """Those of which copies are kept in bfloat16 (stages/graph/parameter_reads.py): of these weight and
    gradient take half of the bytes on the device.
    """
    looked_up: int = 0
    """Elements of tables in which rows are looked up: a microbatch's gradient has but the rows that it names
    (stages/graph/parameter_reads.py).
    """
    constants: int = 0
    """Bytes, always on the device."""
    activations: int = 0
    """Bytes of the microbatches under way, on the device."""
    recomputable: int = 0
    """Of these so many need not be kept (pipeline/recomputed_blocks.py)."""
    copies: int = 0
    """Those of them that are autocast's copies of weights: weights that are kept in bfloat16 have none."""
    upkeep: Upkeep = Upkeep()

    def room(self, kind: Offload, *, apart: bool, spills: bool = True) -> Room:
        """Bytes in each memory; `apart` and `spills` as in `Upkeep.each`."""
        vectors = self.upkeep.each(kind, apart=apart, spills=spills).times(self.numbers)
        saved = HALF * self.upkeep.computing * self.halved if runs_away(kind, apart=apart) else 0
        saved += NUMBER * self.looked_up
        device = vectors.device - saved + self.constants + self.active(kind, apart=apart)
        return Room(device=device, host=vectors.host, disk=vectors.disk)

    def active(self, kind: Offload, *, apart: bool) -> int:
        """Bytes of the microbatches under way."""
        return self.activations - (self.copies if runs_away(kind, apart=apart) else 0)

    @property
    def in_one_memory(self) -> int:
        """Bytes if everything is in one memory: the size of the place."""
        return self.room(Offload.NONE, apart=False, spills=False).device

    @classmethod
    def of_all(cls, demands: Sequence[PlaceDemand]) -> PlaceDemand:
        """The demand of all of these blocks, which have the upkeep of the first."""
        return cls(
            numbers=sum(demand.numbers for demand in demands),
            halved=sum(demand.halved for demand in demands),
            looked_up=sum(demand.looked_up for demand in demands),
            constants=sum(demand.constants for demand in demands),
            activations=sum(demand.activations for demand in demands),
            recomputable=sum(demand.recomputable for demand in demands),
            copies=sum(demand.copies for demand in demands),
            upkeep=demands[0].upkeep if demands else Upkeep(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A kind of offload for a place, and its room there. It fits if nothing is `missing`."""

    kind: Offload
    room: Room
    missing: Room = Room()
    scratch: int = 0
    """Bytes of the room on the disk that are the scratch file's; the others are for copies of states."""
    activations: int = 0
    """Bytes of the room on the device that are for microbatches."""

    @property
    def spills(self) -> bool:
        """Whether the scratch file has a part of the place."""
        return self.scratch > 0

    @property
    def fits(self) -> bool:
        """Whether the place fits into what is offered."""
        return not self.missing.total

    def scratch_limit(self, disk: int, blocks: int) -> int:
        """Bytes that the scratch file may have of those of the `disk`, for so many `blocks`.

        That is its part of the room, and if the disk has it something for gaps between places. Copies of
        states keep theirs.
        """
        copies = self.room.disk - self.scratch
        gaps = self.scratch // GAPS + blocks * PAGES if self.spills else 0
        return max(min(self.scratch + gaps, disk - copies), 0)


def choose(demand: PlaceDemand, offered: Offered) -> Choice:
    """The first allowed kind with which a place fits; if none does, the one that lacks the fewest bytes.

    Both sides decide with this: the coordinator that offers places, and the volunteer that claims one.
    """
    found = []
    for choice, _ in choices([demand], offered):
        if choice.fits:
            return choice
        found.append(choice)
    return min(found, key=lambda choice: choice.missing.total)


def choices(demands: Sequence[PlaceDemand], offered: Offered) -> Iterator[tuple[Choice, list[int]]]:
    """Each allowed kind for a place of these `demands`, and the bytes of each of them on the device.

    Offload hides behind computation and recomputing does not, so that is tried last.
    """
    tried = [demands]
    if any(demand.recomputable for demand in demands):
        tried.append([_recomputing(demand) for demand in demands])
    for some, (kind, spills) in itertools.product(tried, tuple(offered.ways())):
        whole = PlaceDemand.of_all(some)
        room = whole.room(kind, apart=offered.apart, spills=spills)
        copies = NUMBER * whole.upkeep.in_state * whole.numbers
        choice = Choice(
            kind=kind,
            room=room,
            missing=room.beyond(offered),
            scratch=max(room.disk - copies, 0),
            activations=whole.active(kind, apart=offered.apart),
        )
        each = [demand.room(kind, apart=offered.apart, spills=spills).device for demand in some]
        yield choice, each


def _recomputing(demand: PlaceDemand) -> PlaceDemand:
    """The demand with all activations computed again that can be."""
    return replace(
        demand,
        activations=demand.activations - demand.recomputable,
        recomputable=0,
        copies=min(demand.copies // IN_FLIGHT, demand.activations - demand.recomputable),
    )


def capacity(offered: Offered, upkeep: Upkeep) -> int:
    """Parameters that a place could have at most, without constants and activations."""
    numbers = [0]
    for kind, spills in offered.ways():
        each = upkeep.each(kind, apart=offered.apart, spills=spills)
        amounts = ((offered.device, each.device), (offered.host, each.host), (offered.disk, each.disk))
        numbers.append(min(there // one for there, one in amounts if one))
    return max(numbers)


def room_text(room: Room, *, apart: bool) -> str:
    """`7.2 GiB of GPU memory and 12.0 GiB of main memory`; a memory of which there is nothing is left out.

    `apart`: the device has a memory of its own.
    """
    names = ("GPU memory" if apart else "memory", "main memory", "disk")
    sizes = (room.device, room.host, room.disk)
    parts = [f"{_size_text(nbytes)} of {name}" for nbytes, name in zip(sizes, names, strict=True) if nbytes]
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part) or "nothing"


def _size_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"
