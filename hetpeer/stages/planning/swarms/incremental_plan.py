"""Incremental planning: changes to a working swarm, each with a price. Any time, seeded. Pure except for
`on`.

A device that gets new blocks must fetch their state, and nobody trains meanwhile. So a candidate's price is
the time of the remaining steps with it, plus that of moving. Candidates begin with the swarm as it is, where
the blocks of lost volunteers go to their neighbours or to an unused device, and with the best plan of a
search from nothing. Then borders move, and devices swap, enter and leave.

The swarm as it is counts with the best step time that it could reach: routed freely (current_step_time.py)
or by its pipelines; all who hold a block take part in its reduce, also those that no pipeline needs. A
candidate counts with its pipelines alone: the devices that it leaves out become backups. So each further
change makes a shorter step than the last one promised. `Stakes` say what a change has to earn, by the steps
that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise, product

import numpy as np

from hetpeer.stages.planning.swarms.current_step_time import Bools, PipelinePlace, Range, as_it_is, as_routed
from hetpeer.stages.planning.swarms.departure_costs import added_s
from hetpeer.stages.planning.swarms.pipeline_cuts import REMEMBERED, PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.stakes import Stakes
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan, planned

OrderAndCuts = tuple[tuple[int, ...], tuple[int, ...]]
"""A pipeline: its devices in order, and where the blocks are cut."""

SETTLE_S = 5.0
"""Seconds without training after any move, while graphs are loaded anew."""
MOVES = 1500
HOT, COLD = 0.02, 1e-3
MENDINGS = 256
"""Ways to close gaps that are tried."""
SEARCHED = 0.3
"""Fraction of the moves spent on a search from nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """Another plan, and the price of getting there."""

    plan: SwarmPlan
    moving_s: float
    """Seconds in which nobody trains, as such moves take in this run. 0: all its pipelines exist."""
    moved: int
    """Blocks that its pipelines have to fetch. 0: other pipelines, or fewer, of the same holders."""


class IncrementalPlanner:
    """Changes to a swarm of `devices`, where device d holds the blocks `held[d]` ((0, 0): none, or a backup).

    `lines`: the places of each present pipeline. `measured`: (N, N), links with a measured rate (None: all).
    `lost`: the lines that were complete before a loss (None: all); in others places are open because nobody
    has come yet.

        change = IncrementalPlanner(devices, work, held, lines, Stakes(steps=1000), seed=0).run(on)
    """

    def __init__(
        self,
        devices: Devices,
        work: StepDemand,
        held: Sequence[Range],
        lines: Sequence[Sequence[PipelinePlace]],
        stakes: Stakes,
        *,
        seed: int,
        measured: Bools | None = None,
        lost: Collection[int] | None = None,
    ) -> None:
        self._devices, self._work, self._held, self._lines = devices, work, list(held), lines
        self._stakes = stakes
        self._lost = frozenset(range(len(lines)) if lost is None else lost)
        self._most = 0
        """Blocks that may be moved."""
        self._random = np.random.default_rng(seed)
        self._pipelines = PipelineCuts(devices, work)
        self._search = PlanSearch(devices, work, seed)
        self._at = lru_cache(REMEMBERED)(self._pipelines.at)
        whole = [line for line in lines if line and all(device is not None for device, _ in line)]
        self._whole = [next(_closed(line, ())) for line in whole]
        """Complete pipelines as they are."""
        routed = None if measured is None else as_routed(devices, lines, measured)
        self.before_s = min(as_it_is(devices, work, held, routed), self._by_pipelines())
        """Seconds of a step as things stand, by the model; infinite if nothing can run."""
        self._departures_s = added_s(devices, work, held, self.before_s)
        steps = stakes.steps if math.isfinite(self.before_s) else max(stakes.steps, 1.0)
        self._weight = steps * stakes.believed(self.before_s) / stakes.demand
        """Seconds of moving that a second of a step is worth."""

    def run(self, on: Callable[[], bool]) -> PlanChange | None:
        """The best change found while `on` is true; None if everything should stay as it is."""
        begun: list[list[OrderAndCuts]] = []
        for most in self._limits():
            self._most = most
            begun = [lines for lines in self._beginnings(on) if self._price(lines) < math.inf]
            if begun:
                break
        if not begun:
            return None
        best = min(begun, key=self._price)
        while on():
            found = self._anneal(best, on)
            best = min(best, found, key=self._price)
        change = self.change(best)
        assert change is not None
        return change if change.moving_s and self.pays(change) else None

    def pays(self, change: PlanChange) -> bool:
        """Whether `change` earns what it costs."""
        return self._stakes.pays(self.before_s, change.plan.total_s, change.moving_s, self.steadier_s(change))

    def steadier_s(self, change: PlanChange) -> float:
        """Seconds of a step that departures cost less after `change`; 0 if nobody speaks of them."""
        return self._departures_s - (change.plan.expected_s - change.plan.total_s)

    def change(self, lines: Sequence[OrderAndCuts]) -> PlanChange | None:
        """The change to these pipelines, without cost if nobody else works now and all of them exist; None if
        memory or links do not allow it.
        """
        plan = self._planned(lines, ())
        if plan is None:
            return None
        places = {
            device: place
            for pipeline in plan.pipelines
            for device, place in zip(pipeline.devices, pairwise(pipeline.cuts), strict=True)
        }
        moved, moving_s = self._moving(places)
        working = {device for device, (begin, end) in enumerate(self._held) if begin < end}
        there = all((one.devices, one.cuts) in self._whole for one in plan.pipelines)
        stays = there and working <= places.keys()
        return PlanChange(plan=plan, moving_s=0.0 if stays else moving_s, moved=moved)

    def _planned(self, lines: Sequence[OrderAndCuts], held: Sequence[Range]) -> SwarmPlan | None:
        """The plan of these pipelines, in whose reduces others that hold blocks take part as well."""
        made = [self._at(order, cuts) for order, cuts in lines]
        possible = [one for one in made if one is not None]
        if not made or len(possible) < len(made):
            return None
        return planned(self._devices, self._work, possible, held)

    def _by_pipelines(self) -> float:
        """Seconds of a step in which microbatches keep to the present pipelines that are complete."""
        plan = self._planned(self._whole, self._held)
        return math.inf if plan is None else plan.total_s

    def _moving(self, places: Mapping[int, Range]) -> tuple[int, float]:
        """(blocks to be fetched by devices that are to have `places`, seconds that it takes).

        Everything is stored once, through all uplinks together, and new blocks are fetched by all at once. No
        downlink is taken to be slower than the uplink beside it. A single device has no link to others, and
        fetches from the storage.
        """
        arriving, moved = np.zeros(len(self._devices)), 0
        for device, place in places.items():
            begin, end = self._held[device]
            new = [block for block in range(*place) if not begin <= block < end]
            arriving[device] = self._work.state[new].sum()
            moved += len(new)
        uplink = self._devices.uplink
        if len(uplink) > 1:
            uplink = np.minimum(uplink, self._devices.bandwidth.max(axis=1, initial=1e-300))
        stored = self._work.state.sum() / uplink.sum()
        fetched = max((arriving / uplink).max(), arriving.sum() / uplink.max())
        return moved, float(SETTLE_S + stored + fetched) * self._stakes.costs

    def _price(self, lines: Sequence[OrderAndCuts]) -> float:
        change = self.change(lines)
        if change is None or change.moved > self._most:
            return math.inf
        return self._weight * change.plan.expected_s + change.moving_s

    def _limits(self) -> Iterator[int]:
        """Bounds on moved blocks: after a loss the lost ones and a neighbour's, if enough; else all."""
        few = 0
        for number, line in enumerate(self._lines):
            if number not in self._lost:
                continue
            sizes = [end - begin for _, (begin, end) in line]
            for place, (device, _) in enumerate(line):
                beside = [
                    sizes[n] for n in (place - 1, place + 1) if 0 <= n < len(line) and line[n][0] is not None
                ]
                few += sizes[place] + max(beside, default=0) if device is None else 0
        if few:
            yield few
        yield len(self._devices) * len(self._work)

    # ── beginnings ─────────────────────────────────────────────────────────────────────────────────────────

    def _beginnings(self, on: Callable[[], bool]) -> Iterator[list[OrderAndCuts]]:
        """Plans to begin the search with: mended present ones, then the best of a short search."""
        yield from self.mendings()
        left = int(SEARCHED * MOVES)

        def briefly() -> bool:
            nonlocal left
            left -= 1
            return left > 0 and on()

        found = self._search.run(briefly)
        if found is not None:
            yield [(pipeline.devices, pipeline.cuts) for pipeline in found.best.pipelines]

    def mendings(self) -> Iterator[list[OrderAndCuts]]:
        """The present pipelines with their gaps closed, by dividing among neighbours or by a device without
        pipeline.

        A pipeline without devices is left out. So are those still being filled, in a second attempt, and all
        with gaps, in a third; then their devices are in no pipeline.
        """
        alive = {
            number: line
            for number, line in enumerate(self._lines)
            if any(device is not None for device, _ in line)
        }
        whole = frozenset(n for n, line in alive.items() if all(device is not None for device, _ in line))
        for numbers in dict.fromkeys((frozenset(alive), whole | self._lost & alive.keys(), whole)):
            yield from self._mended([alive[number] for number in sorted(numbers)])

    def _mended(self, lines: Sequence[Sequence[PipelinePlace]]) -> Iterator[list[OrderAndCuts]]:
        """Pipelines of `lines` with their gaps closed, less those that memory or links do not allow."""
        here = {device for line in lines for device, _ in line}
        spare = [device for device in range(len(self._devices)) if device not in here]
        ways = [
            [way for way in islice(_closed(line, spare), MENDINGS) if self._at(*way) is not None]
            for line in lines
        ]
        if not all(ways):
            yield from self._mended([line for line, some in zip(lines, ways, strict=True) if some])
            return
        for made in islice(product(*ways), MENDINGS):
            devices = [device for order, _ in made for device in order]
            if made and len(set(devices)) == len(devices):
                yield list(made)

    # ── annealing ──────────────────────────────────────────────────────────────────────────────────────────

    def _anneal(self, lines: list[OrderAndCuts], on: Callable[[], bool]) -> list[OrderAndCuts]:
        """The best result of MOVES moves; worse ones are accepted more and more rarely (Metropolis)."""
        cost = best_cost = self._price(lines)
        best = lines
        for move in range(MOVES):
            if not on():
                break
            temperature = HOT * (COLD / HOT) ** (move / MOVES)
            limit = cost * (1.0 - temperature * math.log(1.0 - self._random.random()))
            changed = self._changed(lines)
            if changed is None or (price := self._price(changed)) > limit:
                continue
            lines, cost = changed, price
            if cost < best_cost:
                best_cost, best = cost, lines
        return best

    def _changed(self, lines: list[OrderAndCuts]) -> list[OrderAndCuts] | None:
        """One random move; None if it has no effect."""
        which = int(self._random.integers(len(lines)))
        order, cuts = [*lines[which][0]], [*lines[which][1]]
        used = {device for devices, _ in lines for device in devices}
        spare = [device for device in range(len(self._devices)) if device not in used]
        place = int(self._random.integers(len(order)))
        match int(self._random.integers(5)):
            case 0 if len(order) > 1:
                border = int(self._random.integers(1, len(order)))
                cuts[border] += int(self._random.choice((-2, -1, 1, 2)))
            case 1:
                return self._swapped(lines, which, place, spare)
            case 2:
                best = self._pipelines.best(tuple(order))
                cuts = cuts if best is None else [*best.cuts]
            case 3 if spare:
                order.insert(place, int(self._random.choice(spare)))
                cuts.insert(place + 1, int(self._random.integers(cuts[place], cuts[place + 1])))
            case 4 if len(order) > 1:
                del order[place]
                inner = place + int(self._random.integers(2))  # the border that goes to a neighbour
                del cuts[min(max(inner, 1), len(cuts) - 2)]
            case _:
                return None
        if any(one >= other for one, other in pairwise(cuts)) or (tuple(order), tuple(cuts)) == lines[which]:
            return None
        return [*lines[:which], (tuple(order), tuple(cuts)), *lines[which + 1 :]]

    def _swapped(
        self, lines: list[OrderAndCuts], which: int, place: int, spare: list[int]
    ) -> list[OrderAndCuts] | None:
        """The device at a place changes with another one, of a pipeline or unused."""
        one = lines[which][0][place]
        others = [device for order, _ in lines for device in order if device != one] + spare
        if not others:
            return None
        other = int(self._random.choice(others))
        change = {one: other, other: one}
        return [(tuple(change.get(device, device) for device in order), cuts) for order, cuts in lines]


def _closed(line: Sequence[PipelinePlace], spare: Sequence[int]) -> Iterator[OrderAndCuts]:
    """All ways to close the gaps of `line`."""
    gap = next((place for place, (device, _) in enumerate(line) if device is None), None)
    if gap is None:
        cuts = (0, *(end for _, (_, end) in line))
        yield tuple(device for device, _ in line if device is not None), cuts
        return
    end = gap
    while end < len(line) and line[end][0] is None:
        end += 1
    left, right = line[:gap], line[end:]
    begin_block, end_block = line[gap][1][0], line[end - 1][1][1]
    for device in spare:
        rest = [other for other in spare if other != device]
        yield from _closed([*left, (device, (begin_block, end_block)), *right], rest)
    for border in range(begin_block, end_block + 1):
        if (border > begin_block and not left) or (border < end_block and not right):
            continue
        nearer = [(d, (b, border)) for d, (b, _) in left[-1:]]
        further = [(d, (border, e)) for d, (_, e) in right[:1]]
        yield from _closed([*left[:-1], *nearer, *further, *right[1:]], spare)
