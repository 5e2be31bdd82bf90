"""Inputs of a plan: devices, the links between them, and the demand of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetpeer.stages.block.offload import Offload
from hetpeer.stages.graph.block_spec import times_forward
from hetpeer.stages.pipeline.place_memory import (
    HALF,
    IN_FLIGHT,
    NUMBER,
    Offered,
    PlaceDemand,
    Upkeep,
    choose,
    runs_away,
)

Floats = NDArray[np.float64]
LATENCY_S, LINE = 0.02, 125e6
"""Seconds one way and bytes/s of links without other information."""
AWAY_S = 60.0
"""Seconds until one that left is back or replaced, without other information."""


PCIE, DISK = 12e9, 1e9
"""Bytes/s between a GPU and main memory (PCIe 3, 16 lanes), and of a disk, without other information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedSeconds:
    """Seconds in which numbers are on the way between a GPU, main memory and a disk."""

    byte: float
    """For a byte of weights: a microbatch's gradient goes down to its slot, and a step's weights go up."""
    filed: float
    """For a parameter: what its update needs of the scratch file is read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a device offers beside the memory that it computes in."""

    host: float = 0.0
    """Bytes of main memory beside a GPU; 0: the device computes in main memory."""
    disk: float = 0.0
    kinds: tuple[Offload, ...] = tuple(Offload)
    """Allowed kinds of offload, the best first."""
    pcie: float = PCIE
    """Bytes/s between device and main memory; infinite where a measured speed contains it."""
    disk_rate: float = DISK
    """Bytes/s of the disk; infinite likewise."""

    def carried_s(self, kind: Offload, upkeep: Upkeep) -> CarriedSeconds:
        """Seconds on the way between the memories: for each byte of weights, for each number of the file."""
        apart = self.host > 0
        filed_s = 2 * upkeep.updated(kind, apart=apart) / self.disk_rate if kind is Offload.DISK else 0.0
        return CarriedSeconds(byte=1 / self.pcie if runs_away(kind, apart=apart) else 0.0, filed=filed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Which devices share a processor, and which an uplink. Equal numbers share; (N,) each."""

    processor: NDArray[np.intp]
    part: Floats
    """Fraction of its processor that a device takes while it computes, 0…1."""
    line: NDArray[np.intp]

    def some(self, which: Sequence[int]) -> Sharing:
        """That of the devices `which`, in this order."""
        chosen = list(which)
        return Sharing(processor=self.processor[chosen], part=self.part[chosen], line=self.line[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class DepartureRates:
    """How often each device leaves, and for how long it is away.

    >>> DepartureRates(rate=np.array([1 / 180]), away_s=20.0).away.tolist()
    [0.1]
    """

    rate: Floats
    """Departures a second while it is there, (N,)."""
    away_s: float = AWAY_S
    """Seconds until it is back, or another has its place."""

    @property
    def away(self) -> Floats:
        """Fraction of the time that each is away, (N,)."""
        share: Floats = self.rate * self.away_s / (1.0 + self.rate * self.away_s)
        return share

    def some(self, which: Sequence[int]) -> DepartureRates:
        """Those of the devices `which`, in this order."""
        return DepartureRates(rate=self.rate[list(which)], away_s=self.away_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """N devices. Links are directed: [i, j] is from i to j."""

    flops: Floats
    """FLOP/s that a worker reaches."""
    memory: Floats
    """Bytes that each device offers of the memory that it computes in, (N,)."""
    uplink: Floats
    """Bytes/s to all others together; infinite if only the pairs are known."""
    latency: Floats
    """Seconds, (N, N)."""
    bandwidth: Floats
    """Bytes/s, (N, N); 0: the two devices do not reach each other."""
    beside: tuple[Beside, ...] = ()
    """What each offers beside `memory`; empty: nothing."""
    sharing: Sharing | None = None
    """None: each has a processor and a line of its own."""
    departures: DepartureRates | None = None
    """None: nobody says how often it leaves, and departures cost nothing."""

    def besides(self, device: int) -> Beside:
        """What a device offers beside its memory."""
        return self.beside[device] if self.beside else Beside()

    def offered(self, device: int) -> Offered:
        """What a device offers to a place."""
        beside = self.besides(device)
        return Offered(
            device=int(self.memory[device]),
            host=int(beside.host),
            disk=int(beside.disk),
            kinds=beside.kinds,
        )

    def __len__(self) -> int:
        return len(self.flops)

    def some(self, which: Sequence[int]) -> Devices:
        """The devices `which`, in this order."""
        chosen, pairs = list(which), np.ix_(which, which)
        return Devices(
            flops=self.flops[chosen],
            memory=self.memory[chosen],
            uplink=self.uplink[chosen],
            latency=self.latency[pairs],
            bandwidth=self.bandwidth[pairs],
            beside=tuple(self.beside[device] for device in chosen) if self.beside else (),
            sharing=None if self.sharing is None else self.sharing.some(chosen),
            departures=None if self.departures is None else self.departures.some(chosen),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Factors by which links compress tensors (docs/links.md)."""

    forward: float = 1.0
    backward: float = 1.0
    reduce: float = 1.0
    """Factor for gradients on their way into sums, and for the sums."""
    adaptive: bool = False
    """Whether activations and their gradients are compressed only on links slower than computing, as far as
    it helps.

    This is FusionLLM's Eq. 7.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Pipelines train batches of their own, and average (mode `grouped`, docs/grouped.md)."""

    interval: int = 1
    """Batches that a pipeline trains before it averages."""
    delayed: bool = False
    """Whether a pipeline trains its next batches while it averages."""


PLAIN = Upkeep()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDemand:
    """Demand of a step for each of B blocks."""

    flops: Floats
    """FLOPs of a microbatch's forward, (B,)."""
    constants: Floats
    """Bytes of a block that are always on the device, (B,)."""
    kept: Floats
    """Bytes of a microbatch between its forward and its backward, (B,)."""
    crossing: Floats
    """Bytes of a microbatch that enter block b; its gradient has as many. (B + 1,), 0 at both ends."""
    reduced: Floats
    """Bytes of a block's gradient, (B,)."""
    state: Floats
    """Bytes of a block's state that a newcomer fetches, (B,)."""
    microbatches: int
    """Microbatches of a step."""
    numbers: Floats | None = None
    """Elements of a block's vector, (B,); None: `constants` are all of a block."""
    copies: Floats | None = None
    """Bytes of `kept` that are autocast's copies of weights, (B,); None: none."""
    recomputable: Floats | None = None
    """Bytes of `kept` that a microbatch that waits need not keep, (B,); None: none."""
    looked_up: Floats | None = None
    """Elements of tables whose gradient has but the rows that a microbatch names, (B,); None: none."""
    halved: Floats | None = None
    """Those of which a GPU keeps copies in bfloat16 (B,); None: none."""
    upkeep: Upkeep = PLAIN
    """What is kept of each element."""
    recompute: bool = False
    compression: Compression = Compression()
    staleness: int = 0
    """Steps that begin before the one that they follow is over (docs/asynchronous.md)."""
    averaging: Averaging | None = None
    """None: all pipelines share the microbatches of each step (mode `exact`)."""
    between_s: float = 0.0
    """Seconds from a step's last work or last sum to the next step's first work: votes, commit, update."""
    checkpoint_every: int = 10
    """Steps from one checkpoint to the next."""

    def __len__(self) -> int:
        return len(self.flops)

    @property
    def elements(self) -> Floats:
        """Elements of a block's vector, (B,)."""
        return np.zeros(len(self)) if self.numbers is None else self.numbers

    @property
    def copied(self) -> Floats:
        """Bytes of a block's weights, or of its gradient, where a GPU has copies, (B,)."""
        saved = np.zeros(len(self)) if self.halved is None else HALF * self.halved
        return NUMBER * self.elements - saved

    @property
    def always(self) -> Floats:
        """Bytes of a block that are on the device beside `Upkeep.each` of its elements, (B,).

        A table's gradient makes them fewer.
        """
        return self.constants if self.looked_up is None else self.constants - NUMBER * self.looked_up

    @property
    def memory(self) -> Floats:
        """Bytes of a block if everything is in one memory, without activations, (B,)."""
        each = self.upkeep.each(Offload.NONE, apart=False, spills=False)
        needed: Floats = each.device * self.elements + self.always
        return needed

    def place(self, begin: int, end: int) -> PlaceDemand:
        """What the blocks [begin, end) take, with the activations that a place is offered with."""
        blocks = slice(begin, end)
        return PlaceDemand(
            numbers=int(self.elements[blocks].sum()),
            looked_up=0 if self.looked_up is None else int(self.looked_up[blocks].sum()),
            halved=0 if self.halved is None else int(self.halved[blocks].sum()),
            constants=int(self.constants[blocks].sum()),
            activations=int(IN_FLIGHT * self.kept[blocks].sum()),
            recomputable=0
            if self.recomputable is None
            else int((IN_FLIGHT - 1) * self.recomputable[blocks].sum()),
            copies=0 if self.copies is None else int(IN_FLIGHT * self.copies[blocks].sum()),
            upkeep=self.upkeep,
        )

    def carried_s(self, devices: Devices, device: int, begin: int, end: int) -> tuple[float, float]:
        """Seconds on the way of a microbatch's gradient, and of a step's update, at the blocks [begin, end).

        The volunteer chooses its kind of offload for these blocks.
        """
        place = self.place(begin, end)
        kind = choose(place, devices.offered(device)).kind
        seconds = devices.besides(device).carried_s(kind, self.upkeep)
        copied_s = seconds.byte * float(self.copied[begin:end].sum())
        return copied_s, copied_s + seconds.filed * place.numbers

    @property
    def computed(self) -> int:
        """FLOPs of a microbatch, as a multiple of its forward's."""
        return times_forward(self.recompute)

    def step_s(self, steady: float, alone: float, after: float) -> float:
        """Seconds from one step to the next.

        `steady`: its microbatches if the pipeline never empties; `alone`: a step by itself, with filling and
        draining; `after`: from its last work to its end: reduce and `between_s`. Steps one after the other
        take both. Of S + 1 that overlap none waits for filling or reduces, as long as those go on beside the
        work of the next; but each takes its time from beginning to end, and no more than S + 1 are under way.
        """
        if not self.staleness:
            return alone + after
        return max(steady, after, (alone + after) / (self.staleness + 1))
