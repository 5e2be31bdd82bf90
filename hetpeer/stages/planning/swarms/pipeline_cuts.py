"""Optimal cuts of one pipeline: devices in an order, and blocks divided among them for the least period.
Pure.

A stage is busy with a microbatch while it computes, or while its links carry what it sends forward and back,
whichever is longer, since it does both at once: FusionLLM's Eq. 3 (arXiv 2410.12707), DT-FM's overlap (arXiv
2206.01288, section 3.5). The slowest stage sets the period. Links that may compress do so until they are not
the bottleneck, as far as they can (FusionLLM, Eq. 7 and 8). Memory is a limit for each device (FusionLLM, Eq.
6): its own, main memory and disk, with the first kind of offload that fits (docs/memory.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from hetpeer.stages.block.offload import Offload
from hetpeer.stages.links.adaptive_ratio import SLACK
from hetpeer.stages.pipeline.place_memory import NUMBER, Room, Upkeep, capacity, runs_away
from hetpeer.stages.planning.swarms.plan_inputs import CarriedSeconds, Devices, Floats, StepDemand

REMEMBERED = 1 << 15
TABLES = 1 << 25
"""Bytes of remembered tables: times of a device between two others."""
ROUNDING = 1e-9
Numbers = NDArray[np.int_]
Blocks = tuple[int, int] | EllipsisType
"""[begin, end), or all possible ones: a number, or a table by begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """Devices with their blocks, and the costs of a microbatch in seconds."""

    devices: tuple[int, ...]
    cuts: tuple[int, ...]
    """Device k has the blocks [cuts[k], cuts[k + 1])."""
    period: float
    """Seconds from one microbatch to the next."""
    fill: float
    """One microbatch alone, there and back."""
    slowest: tuple[str, int]
    """The stage that sets the period: (`computing` or `sending`, device)."""
    update: float = 0.0
    """Seconds in which the slowest update carries numbers between device, main memory and disk."""

    def seconds(self, microbatches: int) -> float:
        """Seconds of `microbatches` microbatches: FILL + (n - 1) BOTTLENECK."""
        return self.fill + (microbatches - 1) * self.period if microbatches else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One device of a pipeline: seconds that a microbatch keeps it busy, and the memory it needs."""

    device: int
    begin: int
    end: int
    """Blocks [begin, end) of the device."""
    computing: float
    sending: float
    """The slower of its links, or its uplink with both directions, at full compression."""
    memory: float
    """Bytes on the device."""
    host: float = 0.0
    """Bytes of main memory beside a GPU."""
    disk: float = 0.0
    """Bytes of the scratch file."""
    offload: Offload = Offload.NONE
    update: float = 0.0
    """Seconds as in `PlannedPipeline`."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A kind of offload and whether slots spill, with the bytes and seconds for the device that goes it."""

    kind: Offload
    each: Room
    """Bytes of one parameter."""
    apart: bool
    carried: CarriedSeconds

    @property
    def away(self) -> bool:
        """Whether the device has copies of the weights."""
        return runs_away(self.kind, apart=self.apart)


class PipelineCuts:
    """All pipelines that can be made of `devices` for `work`; results are cached."""

    def __init__(self, devices: Devices, work: StepDemand) -> None:
        self.devices, self.work = devices, work
        blocks = len(work)
        begin, end = np.indices((blocks + 1, blocks + 1))
        self._computed = _sums(work.flops) * work.computed
        self._numbers, self._constants = _sums(work.elements), _sums(work.always)
        self._kept, self._copied = _sums(work.kept), _sums(work.copied)
        copies = np.zeros(blocks) if work.copies is None else work.copies
        self._kept_away = _sums(work.kept - copies)
        """Bytes of a microbatch where the device keeps weights in bfloat16."""
        self._ways = [_ways(devices, device, work.upkeep) for device in range(len(devices))]
        self._entering = np.broadcast_to(work.crossing[:, None], begin.shape)
        """[a, b]: bytes that enter the blocks [a, b), in memory."""
        self._leaving = np.broadcast_to(work.crossing[None, :], begin.shape)
        self._back = self._entering / work.compression.backward
        """[a, b]: bytes of their gradient on the way back, and of what they send on."""
        self._on = self._leaving / work.compression.forward
        first, last = begin == 0, end == blocks
        self._allowed = {
            (is_first, is_last): (begin < end) & (first == is_first) & (last == is_last)
            for is_first in (False, True)
            for is_last in (False, True)
        }
        self.best = lru_cache(REMEMBERED)(self._best)
        self._busy = lru_cache(TABLES // self._computed.nbytes)(self._busy_between)
        self._way = lru_cache(TABLES // self._computed.nbytes)(self._way_of)
        self.looked_at = 0
        """Number of orders whose cuts were sought."""
        ways = [way for ways in self._ways for way in ways]
        each = min((way.each.device for way in ways), default=0)
        self._alone = each * work.elements + work.always + work.kept
        if any(way.away for way in ways):
            self._alone -= work.upkeep.computing * (NUMBER * work.elements - work.copied) + copies
        """Bytes of devices that each block needs at least, with one microbatch, (B,)."""
        self._least = float(self._alone.sum()) * (1.0 - ROUNDING)
        """Bytes of devices that every pipeline needs: each block somewhere."""

    @property
    def roomy(self) -> bool:
        """Whether the devices have enough memory for any plan, together and for the largest block."""
        memory, largest = self.devices.memory, self._alone.max()
        return bool(memory.sum() >= self._least and memory.max() >= largest)

    def _best(self, order: tuple[int, ...]) -> PlannedPipeline | None:
        """The cuts with the least period for devices in this order, at least one block each; None if there
        are none.

        Exact: least[b] of the first k devices is min over a < b of max(least[a] of k - 1 devices, time of
        device k for [a, b)).
        """
        self.looked_at += 1
        if not 0 < len(order) <= len(self.work) or self.devices.memory[list(order)].sum() < self._least:
            return None
        cuts = self._cut(self._periods(order, place) for place in range(len(order)))
        return None if cuts is None else self.at(order, cuts)

    def alike(self, orders: Sequence[tuple[int, ...]]) -> list[PlannedPipeline] | None:
        """Equally long pipelines with the same cuts, of the least period of the slowest; None if there are
        none.

        The holders of a block are then the holders of all blocks of a stage, and fewer peers reduce together.
        """
        cuts = self._cut(
            np.maximum.reduce([self._periods(order, place) for order in orders])
            for place in range(len(orders[0]))
        )
        if cuts is None:
            return None
        made = [self.at(order, cuts) for order in orders]
        return [one for one in made if one is not None]

    def _cut(self, periods: Iterable[Floats]) -> tuple[int, ...] | None:
        """The cuts with the least greatest of `periods`: [a, b] of each place with the blocks [a, b)."""
        blocks = len(self.work)
        least = np.full(blocks + 1, np.inf)
        least[0] = 0.0
        choices = []
        for seconds in periods:
            costs = np.maximum(least[:, None], seconds)
            choices.append(costs.argmin(axis=0))
            least = costs.min(axis=0)
        if not np.isfinite(least[blocks]):
            return None
        cuts = [blocks]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        return tuple(reversed(cuts))

    def at(self, order: tuple[int, ...], cuts: tuple[int, ...]) -> PlannedPipeline | None:
        """The pipeline with these cuts; None if memory or links do not allow it."""
        period = max(
            float(self._periods(order, place)[begin, end])
            for place, (begin, end) in enumerate(pairwise(cuts))
        )
        if not np.isfinite(period):
            return None
        stages = self.stages(order, cuts)
        slowest = max(stages, key=lambda stage: max(stage.computing, stage.sending))
        return PlannedPipeline(
            devices=order,
            cuts=cuts,
            period=period,
            fill=self._fill(order, cuts, period) + sum(stage.computing for stage in stages),
            slowest=("computing" if slowest.computing >= slowest.sending else "sending", slowest.device),
            update=max(stage.update for stage in stages),
        )

    def missing_at_the_end(self, order: tuple[int, ...]) -> Room | None:
        """Bytes that the order's last device lacks to take all that is left; None if that is not all.

        The way with the fewest missing bytes, given the others' memory.
        """
        reached = np.zeros(len(self.work) + 1, dtype=np.bool_)
        reached[0] = True
        last = len(order) - 1
        for place, device in enumerate(order[:-1]):
            fits = self._allowed[place == 0, False] & (self._way(device, last - place) >= 0)
            reached = (reached[:, None] & fits).any(axis=0)
        cases = self._allowed[last == 0, True] & reached[:, None]
        if not cases.any():
            return None
        offered = self.devices.offered(order[-1])
        found = []
        for way in self._ways[order[-1]]:
            there = (offered.device, offered.host, offered.disk)
            lacks = np.maximum(np.array(self._needed(way, 0)) - np.reshape(there, (3, 1, 1)), 0.0)
            at = int(np.where(cases, lacks.sum(axis=0), np.inf).argmin())
            device, host, disk = (math.ceil(one.flat[at]) for one in lacks)
            found.append(Room(device=device, host=host, disk=disk))
        return min(found, key=lambda room: room.total)

    def stages(self, order: Sequence[int], cuts: Sequence[int]) -> list[PlannedStage]:
        """The stages of such a pipeline."""
        return [self._stage(order, place, (begin, end)) for place, (begin, end) in enumerate(pairwise(cuts))]

    def _stage(self, order: Sequence[int], place: int, blocks: tuple[int, int]) -> PlannedStage:
        device, behind = order[place], len(order) - 1 - place
        way = self._ways[device][max(int(self._way(device, behind)[blocks]), 0)]
        memory, host, disk = (float(needed) for needed in self._needed(way, behind, blocks))
        return PlannedStage(
            device=device,
            begin=blocks[0],
            end=blocks[1],
            computing=float(self._computing(device, way, blocks)),
            sending=float(self._sending(order, place, blocks)),
            memory=memory,
            host=host,
            disk=disk,
            offload=way.kind,
            update=way.carried.byte * float(self._copied[blocks])
            + way.carried.filed * float(self._numbers[blocks]),
        )

    def _periods(self, order: Sequence[int], place: int) -> Floats:
        """[a, b]: seconds a microbatch over [a, b) occupies the device at `place`; infinite if impossible."""
        near = tuple(order[max(place - 1, 0) : place + 2])
        return self._busy(near, min(place, 1), len(order) - 1 - place)

    def _busy_between(self, near: tuple[int, ...], place: int, behind: int) -> Floats:
        """Periods as in `_periods`, by what matters of an order: neighbours `near`, number `behind`."""
        device = near[place]
        chosen = self._way(device, behind)
        computing = np.full(chosen.shape, np.inf)
        for number, way in enumerate(self._ways[device]):
            computing = np.where(chosen == number, self._computing(device, way), computing)
        busy = np.maximum(self._sending(near, place), computing)
        periods: Floats = np.where(self._allowed[place == 0, behind == 0], busy, np.inf)
        return periods

    def _way_of(self, device: int, behind: int) -> Numbers:
        """[a, b]: the first of the device's ways with which the blocks fit; -1: none does."""
        offered = self.devices.offered(device)
        chosen = np.full(self._computed.shape, -1)
        for number, way in reversed(list(enumerate(self._ways[device]))):
            memory, host, disk = self._needed(way, behind)
            fits = (memory <= self.devices.memory[device]) & (host <= offered.host) & (disk <= offered.disk)
            chosen = np.where(fits, number, chosen)
        return chosen

    def _computing(self, device: int, way: _Way, blocks: Blocks = ...) -> Floats:
        """[a, b]: seconds of a microbatch: forward, backward, and its gradient on the way to its slot."""
        computed = self._computed[blocks] / self.devices.flops[device]
        seconds: Floats = computed + way.carried.byte * self._copied[blocks]
        return seconds

    def _sending(self, order: Sequence[int], place: int, blocks: Blocks = ...) -> Floats:
        """[a, b]: seconds of sending for a microbatch, on and back."""
        devices, device = self.devices, order[place]
        going_back, going_on = self._back[blocks], self._on[blocks]
        behind = len(order) - 1 - place
        per_byte = [0.0, 0.0]
        """Seconds for each byte that goes back, and for each that goes on."""
        for way, beside in enumerate((place - 1, place + 1)):
            if 0 <= beside < len(order):
                per_byte[way] = 1.0 / max(float(devices.bandwidth[device, order[beside]]), 1e-300)
        lines = np.maximum(going_back * per_byte[0], going_on * per_byte[1])
        together = (going_back * (place > 0) + going_on * (behind > 0)) / devices.uplink[device]
        seconds: Floats = np.maximum(lines, together)
        return seconds

    def _needed(self, way: _Way, behind: int, blocks: Blocks = ...) -> tuple[Floats, Floats, Floats]:
        """[a, b]: bytes on the device, in main memory and in the file.

        As many microbatches are in flight as 1F1B has (schedule_1f1b.py). Bundles lie in main memory. With a
        GPU they have their own share of it, and only what leaves the stage is on the GPU once more.
        """
        begun = self.work.microbatches * (self.work.staleness + 1)
        under_way = min(2 * behind + 1, begun)
        entering, leaving, numbers = self._entering[blocks], self._leaving[blocks], self._numbers[blocks]
        bundles = leaving if way.apart else 2 * (entering + leaving)
        held = way.each.device * numbers + self._constants[blocks]
        if way.away:
            held -= self.work.upkeep.computing * (NUMBER * numbers - self._copied[blocks])
        kept = self._kept_away[blocks] if way.away else self._kept[blocks]
        memory: Floats = held + under_way * (kept + bundles)
        return memory, way.each.host * numbers, way.each.disk * numbers

    def _fill(self, order: Sequence[int], cuts: Sequence[int], period: float) -> float:
        """Seconds for which one microbatch alone is on links, forward and back.

        An adaptive link compresses no further than to a fraction of the period.
        """
        devices, compression, total = self.devices, self.work.compression, 0.0
        hidden = SLACK * period if compression.adaptive else 0.0
        for place, device in enumerate(order):
            end = cuts[place + 1]
            if place + 1 < len(order):
                other, nbytes = order[place + 1], self.work.crossing[end]
                for sender, receiver, times in (
                    (device, other, compression.forward),
                    (other, device, compression.backward),
                ):
                    rate = min(devices.bandwidth[sender, receiver], devices.uplink[sender])
                    seconds = nbytes / rate
                    total += devices.latency[sender, receiver] + min(seconds, max(seconds / times, hidden))
        return float(total)


def roominess(devices: Devices, work: StepDemand) -> Floats:
    """Parameters that each device could hold, (N,)."""
    return np.array(
        [capacity(devices.offered(device), work.upkeep) for device in range(len(devices))], dtype=np.float64
    )


def roomiest_last(devices: Devices, work: StepDemand) -> Iterator[tuple[int, ...]]:
    """Orders of one device, of two, and so on: those with most memory, the largest at the end.

    The last stage keeps the fewest microbatches.
    """
    last, *others = np.argsort(-roominess(devices, work), kind="stable").tolist()
    for size in range(min(len(others), len(work) - 1) + 1):
        yield (*others[:size], last)


def lacking(devices: Devices, work: StepDemand) -> tuple[int, Room]:
    """(device with most memory, additional bytes on it that would suffice).

    Behind the best number of other devices, the next largest first, it takes the remaining blocks. Having all
    blocks on it alone is one of these cases; the search tries all of them.
    """
    pipelines = PipelineCuts(devices, work)
    orders = list(roomiest_last(devices, work))
    missing = [room for room in map(pipelines.missing_at_the_end, orders) if room is not None]
    return orders[0][-1], min(missing, key=lambda room: room.total)


def _ways(devices: Devices, device: int, upkeep: Upkeep) -> list[_Way]:
    """The ways that a device's owner allows, in the order in which they are tried."""
    offered, beside = devices.offered(device), devices.besides(device)
    ways = []
    for kind, spills in offered.ways():
        each = upkeep.each(kind, apart=offered.apart, spills=spills)
        ways.append(_Way(kind, each, offered.apart, beside.carried_s(kind, upkeep)))
    return ways


def _sums(values: Floats) -> Floats:
    """[a, b]: the sum of values[a:b]; negative where b < a."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    sums: Floats = total[None, :] - total[:, None]
    return sums
