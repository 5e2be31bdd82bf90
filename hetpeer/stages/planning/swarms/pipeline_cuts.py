"""Optimal cuts of one pipeline: devices in an order, and blocks divided among them for the least period.
Pure.

A stage is busy with a microbatch while it computes, or while its links carry what it sends forward and back,
whichever is longer, since it does both at once: FusionLLM's Eq. 3 (arXiv 2410.12707), DT-FM's overlap (arXiv
2206.01288, section 3.5). The slowest stage sets the period. Links that may compress do so until they are not
the bottleneck, as far as they can (FusionLLM, Eq. 7 and 8). Memory is a limit for each device (FusionLLM, Eq.
6).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import EllipsisType

import numpy as np

from hetpeer.stages.links.adaptive_ratio import SLACK
from hetpeer.stages.planning.swarms.plan_inputs import Devices, Floats, StepDemand

REMEMBERED = 1 << 15
TABLES = 1 << 25
"""Bytes of remembered tables: times of a device between two others."""
ROUNDING = 1e-9
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
    """Bytes."""


class PipelineCuts:
    """All pipelines that can be made of `devices` for `work`; results are cached."""

    def __init__(self, devices: Devices, work: StepDemand) -> None:
        self.devices, self.work = devices, work
        blocks = len(work)
        begin, end = np.indices((blocks + 1, blocks + 1))
        self._computed = _sums(work.flops) * work.computed
        self._memory, self._kept = _sums(work.memory), _sums(work.kept)
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
        self.looked_at = 0
        """Number of orders whose cuts were sought."""
        self._least = float((work.memory + work.kept).sum()) * (1.0 - ROUNDING)
        """Bytes that every pipeline needs: each block somewhere, with one microbatch."""

    @property
    def roomy(self) -> bool:
        """Whether the devices have enough memory for any plan, together and for the largest block."""
        memory, largest = self.devices.memory, (self.work.memory + self.work.kept).max()
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
        fill, slowest = self._fill(order, cuts, period), self._slowest(order, cuts)
        return PlannedPipeline(devices=order, cuts=cuts, period=period, fill=fill, slowest=slowest)

    def needed_at_the_end(self, order: tuple[int, ...]) -> float:
        """Least bytes of the order's last device, given the others' memory; infinite if that is too small."""
        reached = np.zeros(len(self.work) + 1, dtype=np.bool_)
        reached[0] = True
        last = len(order) - 1
        for place, device in enumerate(order[:-1]):
            fits = self._allowed[place == 0, False] & (
                self._needed(last - place) <= self.devices.memory[device]
            )
            reached = (reached[:, None] & fits).any(axis=0)
        ways = self._allowed[last == 0, True] & reached[:, None]
        return float(np.where(ways, self._needed(0), np.inf).min())

    def stages(self, order: Sequence[int], cuts: Sequence[int]) -> list[PlannedStage]:
        """The stages of such a pipeline."""
        return [
            PlannedStage(
                device=device,
                begin=begin,
                end=end,
                computing=float(self._computing(device, (begin, end))),
                sending=float(self._sending(order, place, (begin, end))),
                memory=float(self._needed(len(order) - 1 - place, (begin, end))),
            )
            for place, (device, begin, end) in enumerate(zip(order, cuts, cuts[1:], strict=False))
        ]

    def _slowest(self, order: Sequence[int], cuts: Sequence[int]) -> tuple[str, int]:
        slowest = max(self.stages(order, cuts), key=lambda stage: max(stage.computing, stage.sending))
        return ("computing" if slowest.computing >= slowest.sending else "sending"), slowest.device

    def _periods(self, order: Sequence[int], place: int) -> Floats:
        """[a, b]: seconds a microbatch over [a, b) occupies the device at `place`; infinite if impossible."""
        near = tuple(order[max(place - 1, 0) : place + 2])
        return self._busy(near, min(place, 1), len(order) - 1 - place)

    def _busy_between(self, near: tuple[int, ...], place: int, behind: int) -> Floats:
        """Periods as in `_periods`, by what matters of an order: neighbours `near`, number `behind`."""
        device = near[place]
        busy = np.maximum(self._sending(near, place), self._computing(device))
        fits = self._needed(behind) <= self.devices.memory[device]
        periods: Floats = np.where(self._allowed[place == 0, behind == 0] & fits, busy, np.inf)
        return periods

    def _computing(self, device: int, blocks: Blocks = ...) -> Floats:
        """[a, b]: seconds of a microbatch, forward and backward."""
        seconds: Floats = self._computed[blocks] / self.devices.flops[device]
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

    def _needed(self, behind: int, blocks: Blocks = ...) -> Floats:
        """[a, b]: bytes needed, with as many microbatches in flight as 1F1B has (schedule_1f1b.py)."""
        begun = self.work.microbatches * (self.work.staleness + 1)
        under_way = min(2 * behind + 1, begun)
        held, passing = self._memory[blocks], self._entering[blocks] + self._leaving[blocks]
        needed: Floats = held + under_way * (self._kept[blocks] + 2 * passing)
        return needed

    def _fill(self, order: Sequence[int], cuts: Sequence[int], period: float) -> float:
        """Seconds of one microbatch alone: it is computed at every stage, and crosses every link forward and
        back.

        An adaptive link compresses no further than to a fraction of the period.
        """
        devices, compression, total = self.devices, self.work.compression, 0.0
        hidden = SLACK * period if compression.adaptive else 0.0
        for place, device in enumerate(order):
            begin, end = cuts[place], cuts[place + 1]
            total += self._computed[begin, end] / devices.flops[device]
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


def roomiest_last(devices: Devices, blocks: int) -> Iterator[tuple[int, ...]]:
    """Orders of one device, of two, and so on: those with most memory, the largest at the end.

    The last stage keeps the fewest microbatches.
    """
    last, *others = np.argsort(-devices.memory, kind="stable").tolist()
    for size in range(min(len(others), blocks - 1) + 1):
        yield (*others[:size], last)


def lacking(devices: Devices, work: StepDemand) -> tuple[int, float]:
    """(device with most memory, additional bytes on it that would suffice).

    Behind the best number of other devices, the next largest first, it takes the remaining blocks. Having all
    blocks on it alone is one of these cases; the search tries all of them.
    """
    pipelines = PipelineCuts(devices, work)
    orders = list(roomiest_last(devices, len(work)))
    last = orders[0][-1]
    return last, min(map(pipelines.needed_at_the_end, orders)) - float(devices.memory[last])


def _sums(values: Floats) -> Floats:
    """[a, b]: the sum of values[a:b]; negative where b < a."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    sums: Floats = total[None, :] - total[:, None]
    return sums
