"""Division of volunteers into clusters that train batches of their own and average (Ravnest, 3.5.2;
arXiv 2401.01728).

Pure except for `on`. The goal is useful batches a second of all clusters together, averages included, as
`planned` counts them. Ravnest's goal, clusters that take equally long, is reported beside it: one cluster of
all is balanced and slow. Nobody is left out who could take part: devices outside all clusters cannot hold the
model together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hetpeer.stages.planning.swarms.pipeline_cuts import PlannedPipeline
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import Orders, PlanSearch
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan, planned

USUAL = 200
"""Questions whether there is time that the usual search may ask."""
KICK = 3
"""Random changes before a descent."""
NOTICED = 1 - 1e-9
"""A plan that takes more than this many times as long is no better."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """Clusters of devices, each a pipeline, by the model's figures.

    clusters = divided(devices, work, seed=0, on=lambda: time.monotonic() < deadline)
    clusters.batches_per_s  # of all clusters together
    """

    plan: SwarmPlan
    batch_s: tuple[float, ...]
    """Seconds of a batch in each cluster, without averages."""
    spare: tuple[int, ...]
    """Devices in no cluster: together they cannot hold the model."""

    @property
    def batches_per_s(self) -> float:
        """Batches a second of all clusters together, averages included."""
        return 1.0 / self.plan.total_s

    @property
    def imbalance_s(self) -> float:
        """Ravnest's balance: seconds from the quickest cluster's batch to the slowest's; 0 is balanced."""
        return max(self.batch_s) - min(self.batch_s)


def divided(devices: Devices, work: StepDemand, seed: int, on: Callable[[], bool]) -> Clusters | None:
    """The best clusters found while `on` is true; None if the devices cannot hold the model together.

    `work.averaging` says how often clusters average. Raises ValueError without it.
    """
    if work.averaging is None:
        raise ValueError("clusters need to know how often they average")
    climb = _Climb(devices, work, seed)
    orders = climb.begun(on)
    if not orders:
        return None
    return clusters_of(devices, work, climb.run(orders, on).pipelines)


class _Climb:
    """Descents, each from the best clusters after a few random changes (iterated local search).

    Devices are left out only if they cannot hold the model together.
    """

    def __init__(self, devices: Devices, work: StepDemand, seed: int) -> None:
        self._devices, self._work, self._seed = devices, work, seed
        self._search = PlanSearch(devices, work, seed)
        self._random = np.random.default_rng(seed)
        self._fits: dict[frozenset[int], bool] = {}

    def begun(self, on: Callable[[], bool]) -> Orders:
        """The best plan of a short usual search, then that of the devices it leaves out, and so on."""
        orders: Orders = ()
        left, looks = list(range(len(self._devices))), iter(range(USUAL))
        while left:
            search = PlanSearch(self._devices.some(left), self._work, self._seed)
            found = search.run(lambda: next(looks, None) is not None and on())
            if found is None:
                break
            new = tuple(tuple(left[device] for device in one.devices) for one in found.best.pipelines)
            orders += new
            left = [device for device in left if not any(device in order for order in new)]
        return orders

    def run(self, orders: Orders, on: Callable[[], bool]) -> SwarmPlan:
        """The best plan found from `orders`, which are possible."""
        best = self._search.plan(orders)
        assert best is not None
        while True:
            plan = self._descended(orders, on)
            if plan is not None:
                best = min(best, self._search.settled(plan, on), key=lambda one: one.total_s)
            if not on():
                return best
            orders = tuple(one.devices for one in best.pipelines)
            for _ in range(KICK):
                changes = _changes(orders, len(self._devices))
                orders = changes[int(self._random.integers(len(changes)))]

    def _descended(self, orders: Orders, on: Callable[[], bool]) -> SwarmPlan | None:
        """The plan from `orders` after one change after the other that helps; None if none is possible."""
        plan = self._plan(orders)
        helps = True
        while helps and on():
            helps = False
            changes = _changes(orders, len(self._devices))
            for number in self._random.permutation(len(changes)):
                if not on():
                    break
                other = self._plan(changes[number])
                if other is not None and (plan is None or other.total_s < plan.total_s * NOTICED):
                    plan, orders, helps = other, changes[number], True
                    break
        return plan

    def _plan(self, orders: Orders) -> SwarmPlan | None:
        """The plan; None if memory does not allow it, or it leaves out devices that could hold the model."""
        spare = frozenset(range(len(self._devices))).difference(*orders)
        if spare not in self._fits:
            self._fits[spare] = self._search.fits(spare)
        return None if self._fits[spare] else self._search.plan(orders)


def _changes(orders: Orders, devices: int) -> list[Orders]:
    """All pipelines after a swap of two devices, or after a move of one to any place of any pipeline, or to
    none, or to one of its own.
    """
    used = {device for order in orders for device in order}
    spare = tuple(device for device in range(devices) if device not in used)
    lines = (*orders, spare)
    at = [(line, place) for line, order in enumerate(lines) for place in range(len(order))]
    found: list[Orders] = []
    for (a, i), (b, j) in combinations(at, 2):
        if a == b == len(orders):
            continue
        changed = [list(line) for line in lines]
        changed[a][i], changed[b][j] = lines[b][j], lines[a][i]
        found.append(_made(changed[:-1]))
    for a, i in at:
        rest = [list(line) for line in lines]
        device = rest[a].pop(i)
        for to in range(len(orders)):
            for place in range(len(rest[to]) + 1):
                changed = [list(line) for line in rest]
                changed[to].insert(place, device)
                found.append(_made(changed[:-1]))
        found += [_made([*rest[:-1], [device]]), _made(rest[:-1])]
    return [one for one in found if one]


def _made(lines: Iterable[Sequence[int]]) -> Orders:
    return tuple(tuple(line) for line in lines if line)


def clusters_of(devices: Devices, work: StepDemand, pipelines: Sequence[PlannedPipeline]) -> Clusters:
    """The clusters with these pipelines, one at least."""
    count = work.microbatches
    used = {device for one in pipelines for device in one.devices}
    return Clusters(
        planned(devices, work, pipelines),
        tuple(
            work.step_s(count * one.period, one.seconds(count), 0.0) + work.between_s + one.update
            for one in pipelines
        ),
        tuple(device for device in range(len(devices)) if device not in used),
    )
