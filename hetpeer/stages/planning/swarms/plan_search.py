"""The search for a plan: number of pipelines, devices and their orders, unused devices. Pure except for `on`.

It is an any-time search with a seed. Beginnings are chains through all devices: by nearest neighbours, by
memory, uplink or speed, in the given order, by communities, or by halves (device_clusters.py). Each is cut
into any number of pipelines of about the same speed, laid out so that neighbours form a stage, or reduced to
its first few devices. Then annealing: devices swap, move and turn round; pipelines are split and joined. Only
pipelines that a move touches are cut anew, and cuts are cached. The best plan gets its borders refined for
the whole step (swarm_plan.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise, permutations

import numpy as np

from hetpeer.stages.planning import device_clusters
from hetpeer.stages.planning.swarms.pipeline_cuts import (
    PipelineCuts,
    PlannedPipeline,
    roomiest_last,
    roominess,
)
from hetpeer.stages.planning.swarms.plan_inputs import Devices, Floats, StepDemand
from hetpeer.stages.planning.swarms.swarm_plan import CutRefinement, SwarmPlan, planned

Orders = tuple[tuple[int, ...], ...]
"""The devices of each pipeline; those in none are unused."""

MOVES = 2000
"""Moves of the first annealing; the next are twice as long."""
HOT, COLD = 0.05, 1e-3
"""First and last temperature, as fractions of the cost."""
ALIKE = 64
"""Beginnings that are also tried with equal parts."""
STARTS = 3
"""Devices at which chains begin."""
ADDED = 0.02
"""Fraction of a step beyond which the reduce is a reason to cut pipelines alike."""
MANY, SOME = 32, 8
"""Limits: beyond MANY devices only SOME numbers of pipelines are tried, while there is time."""
MORE = 200
"""Random orders tried if no beginning fits into memory."""
TRIED = 24
"""Orders in which devices are tried together."""
LEAST = 256
"""Pipelines tried whatever the time, if none fits."""


@dataclass(frozen=True, slots=True)
class PlanSearchResult:
    """The best plan, and the number of plans evaluated."""

    best: SwarmPlan
    evaluations: int


class PlanSearch:
    """Searches plans of `devices` for `work`.

    found = PlanSearch(devices, work, seed=0).run(lambda: time.monotonic() < deadline)
    found.best.total_s  # seconds of a step; found is None if no plan fits into memory
    """

    def __init__(self, devices: Devices, work: StepDemand, seed: int) -> None:
        self._devices, self._work = devices, work
        self._random = np.random.default_rng(seed)
        self._pipelines = PipelineCuts(devices, work)
        self._borders = CutRefinement(devices, work, self._pipelines)
        self.evaluations = 0

    def run(self, on: Callable[[], bool]) -> PlanSearchResult | None:
        """The best plan found while `on` is true; None if no beginning fits into memory."""
        begun = [(self._known(orders).expected_s, orders) for orders in self._begun(on)]
        begun = sorted([*begun, *((self._known(orders).expected_s, orders) for orders in self._steady(on))])
        if not begun:
            return None
        alike = [self._borders.alike(orders) for _, orders in begun[:ALIKE]]
        plans = [self._known(begun[0][1]), *(plan for plan in alike if plan is not None)]
        best = self._borders.settled(min(plans, key=_expected), on)
        moves = MOVES
        while on():
            for least, orders in begun[:STARTS]:
                cost, found = self._anneal(orders, moves, on)
                if cost < least:
                    begun.append((cost, found))
                    best = min(best, self._borders.settled(self._known(found), on), key=_expected)
            begun = sorted(set(begun))
            moves *= 2
        return PlanSearchResult(best, self.evaluations)

    def fits(self, devices: Iterable[int]) -> bool:
        """Whether `devices` can hold the model as one pipeline, in one of TRIED orders."""
        orders = islice(permutations(sorted(devices, key=self._roomy)), TRIED)
        return any(self._pipelines.best(order) is not None for order in orders)

    def _roomy(self, device: int) -> float:
        return -float(self._devices.memory[device])

    def settled(self, plan: SwarmPlan, on: Callable[[], bool]) -> SwarmPlan:
        """`plan`, its borders moved one by one while that helps and `on` is true."""
        return self._borders.settled(plan, on)

    def _known(self, orders: Orders) -> SwarmPlan:
        """The plan of pipelines that are possible."""
        plan = self.plan(orders)
        assert plan is not None
        return plan

    def plan(self, orders: Orders) -> SwarmPlan | None:
        """The plan of these pipelines; None if one of them is impossible."""
        self.evaluations += 1
        made: list[PlannedPipeline] = []
        for order in orders:
            one = self._pipelines.best(order)
            if one is None:
                return None
            made.append(one)
        plan = planned(self._devices, self._work, made)
        if plan.sync_s <= ADDED * plan.total_s or len(orders) < 2:
            return plan
        alike = planned(self._devices, self._work, self._cut_alike(made))
        return min(plan, alike, key=_expected)

    def _cut_alike(self, made: list[PlannedPipeline]) -> list[PlannedPipeline]:
        """The pipelines, equally long ones with the same cuts where such cuts exist."""
        by_length: dict[int, list[PlannedPipeline]] = defaultdict(list)
        for one in made:
            by_length[len(one.devices)].append(one)
        alike: list[PlannedPipeline] = []
        for group in by_length.values():
            alike += self._pipelines.alike([one.devices for one in group]) or group
        return alike

    # ── beginnings ─────────────────────────────────────────────────────────────────────────────────────────

    def _begun(self, on: Callable[[], bool]) -> Iterator[Orders]:
        """Beginnings that fit; with many devices only as many as there is time for, but at least one.

        Parts that memory does not allow are left out, and their devices unused.
        """
        if not self._pipelines.roomy:
            return
        found = False
        for fitting in self._fitting(self._chains(), on):
            yield fitting
            found = True
            if len(self._devices) > MANY and not on():
                return
        if found:
            return
        for order in roomiest_last(self._devices, self._work):
            if self._pipelines.best(order) is not None:
                yield (order,)
                found = True
        # memory is short: the devices with room for the largest blocks must be in the right places
        for _ in range(0 if found else MORE):
            chain = self._random.permutation(len(self._devices)).tolist()
            if begun := list(self._fitting([chain], on)):
                yield from begun
                return

    def _steady(self, on: Callable[[], bool]) -> Iterator[Orders]:
        """Pipelines of a short search without the half of the devices that leaves most often."""
        if (departures := self._devices.departures) is None:
            return
        which = np.flatnonzero(departures.rate <= np.median(departures.rate)).tolist()
        if len(which) == len(self._devices):
            return
        search = PlanSearch(self._devices.some(which), self._work, int(self._random.integers(1 << 31)))
        begun = min(
            ((search._known(orders).expected_s, orders) for orders in search._begun(on)), default=None
        )
        if begun is not None:
            _, found = search._anneal(begun[1], MOVES, on)
            yield tuple(tuple(which[place] for place in order) for order in found)

    def _chains(self) -> Iterator[list[int]]:
        """All devices: as given, most memory at the ends, by neighbourhood, resource, community, halves, and
        by how seldom they leave.
        """
        devices, count = self._devices, len(self._devices)
        starts = self._random.permutation(count)[:STARTS].tolist()
        seconds = self._seconds()
        yield from [device_clusters.chain(seconds, start).tolist() for start in starts]
        room = roominess(devices, self._work)
        for most in (room, devices.uplink, devices.flops):
            yield np.argsort(-most, kind="stable").tolist()
        roomy = np.argsort(-room, kind="stable").tolist()
        yield [*roomy[::2], *reversed(roomy[1::2])]
        yield list(range(count))
        together = device_clusters.together(seconds, self._random)
        yield from [device_clusters.chain(together, start).tolist() for start in starts]
        yield device_clusters.by_halves(seconds).tolist()
        if (departures := devices.departures) is not None:  # the steadiest first, neighbours among equals
            for start in starts:
                chain = device_clusters.chain(seconds, start)
                yield chain[np.argsort(departures.rate[chain], kind="stable")].tolist()

    def _fitting(self, chains: Iterable[list[int]], on: Callable[[], bool]) -> Iterator[Orders]:
        """The cuts of `chains` that fit; until time is over if none does."""
        found = False
        for chain in chains:
            for orders in self._cuts(chain):
                if not found and self._pipelines.looked_at >= LEAST and not on():
                    return
                if fitting := tuple(order for order in orders if self._pipelines.best(order) is not None):
                    yield fitting
                    found = True

    def _cuts(self, chain: list[int]) -> Iterator[Orders]:
        """The chain in any number of pipelines, in stages across them, or its first few devices as one.

        With few devices also any number of equally long ones.
        """
        count, blocks = len(chain), len(self._work)
        yield from (_cut(chain, number, self._devices.flops) for number in _numbers(1, count))
        yield from (_across(chain, number, count // number) for number in _numbers(2, count // 2))
        yield from ((tuple(chain[:size]),) for size in _numbers(1, min(count, blocks)))
        yield from (_along(chain, stages) for stages in _numbers(1, min(count // 2, blocks)))
        if count <= MANY:
            for number in range(2, count // 2 + 1):
                yield from (
                    _across(chain, number, stages) for stages in range(1, min(count // number, blocks + 1))
                )

    def _seconds(self) -> Floats:
        """Seconds of a typical border's bytes from each device to each."""
        nbytes = float(np.median(self._work.crossing[1:-1])) if len(self._work) > 1 else 1.0
        with np.errstate(divide="ignore"):
            rates = np.minimum(self._devices.bandwidth, self._devices.uplink[:, None])
            seconds: Floats = self._devices.latency + nbytes / rates
        return seconds

    # ── annealing ──────────────────────────────────────────────────────────────────────────────────────────

    def _anneal(self, orders: Orders, moves: int, on: Callable[[], bool]) -> tuple[float, Orders]:
        """(least seconds of a step, its orders) after at most `moves` steps of simulated annealing."""
        cost = best_cost = self._known(orders).expected_s
        best = orders
        for move in range(moves):
            if not on():
                break
            heat = cost * HOT * (COLD / HOT) ** (move / moves)
            limit = cost - heat * math.log(self._random.random())
            changed = self._changed(orders)
            if changed is None:
                continue
            plan = self.plan(changed)
            if plan is None or plan.expected_s > limit:
                continue
            orders, cost = changed, plan.expected_s
            if cost < best_cost:
                best_cost, best = cost, orders
        return best_cost, best

    def _changed(self, orders: Orders) -> Orders | None:
        """One random move; None if it has no effect."""
        lines = [list(order) for order in orders]
        used = {device for order in orders for device in order}
        lines.append([device for device in range(len(self._devices)) if device not in used])
        spare = len(lines) - 1
        kind = self._random.integers(8)
        if kind < 3:
            self._swap(lines, self._in_the_way(orders) if kind else self._any(lines[:spare]))
        elif kind < 5:
            self._move(lines, spare)
        elif kind == 5:
            self._turn(lines, spare)
        elif kind == 6:
            self._split(lines, spare)
        else:
            self._join(lines, spare)
        changed = tuple(tuple(line) for line in lines[:spare] if line) + tuple(
            tuple(line) for line in lines[spare + 1 :] if line
        )
        return changed if changed and changed != orders else None

    def _any(self, lines: list[list[int]]) -> tuple[int, int]:
        """(pipeline, place) of a random device."""
        number = int(self._random.integers(sum(map(len, lines))))
        for line, devices in enumerate(lines):
            if number < len(devices):
                return line, number
            number -= len(devices)
        raise AssertionError

    def _in_the_way(self, orders: Orders) -> tuple[int, int]:
        """(pipeline, place) of a random pipeline's slowest device, or of a neighbour (a slow link)."""
        line = int(self._random.integers(len(orders)))
        pipeline = self._pipelines.best(orders[line])
        assert pipeline is not None
        place = orders[line].index(pipeline.slowest[1]) + int(self._random.integers(-1, 2))
        return line, min(max(place, 0), len(orders[line]) - 1)

    def _swap(self, lines: list[list[int]], which: tuple[int, int]) -> None:
        (a, i), (b, j) = which, self._any(lines)
        lines[a][i], lines[b][j] = lines[b][j], lines[a][i]

    def _move(self, lines: list[list[int]], spare: int) -> None:
        line, place = self._any(lines)
        device = lines[line].pop(place)
        to = int(self._random.integers(spare + 1))
        lines[to].insert(int(self._random.integers(len(lines[to]) + 1)), device)

    def _turn(self, lines: list[list[int]], spare: int) -> None:
        devices = lines[int(self._random.integers(spare))]
        i, j = sorted(int(one) for one in self._random.integers(len(devices) + 1, size=2))
        devices[i:j] = devices[i:j][::-1]

    def _split(self, lines: list[list[int]], spare: int) -> None:
        devices = lines[int(self._random.integers(spare))]
        place = int(self._random.integers(len(devices) + 1))
        lines.append(devices[place:])
        del devices[place:]

    def _join(self, lines: list[list[int]], spare: int) -> None:
        one, other = (int(n) for n in self._random.integers(spare, size=2))
        if one != other:
            lines[one] += lines[other]
            lines[other] = []


def _expected(plan: SwarmPlan) -> float:
    return plan.expected_s


def _across(chain: list[int], number: int, stages: int) -> Orders:
    """`number` pipelines whose stages are neighbours in the chain; devices at its end stay unused."""
    return tuple(tuple(chain[row : stages * number : number]) for row in range(number))


def _along(chain: list[int], stages: int) -> Orders:
    """Pipelines of `stages` neighbours each; devices at its end stay unused."""
    return tuple(tuple(chain[at : at + stages]) for at in range(0, len(chain) - stages + 1, stages))


def _numbers(least: int, most: int) -> list[int]:
    """All numbers from `least` to `most`, or SOME in geometric distances."""
    if most - least < MANY:
        return list(range(least, most + 1))
    return sorted({round(one) for one in np.geomspace(least, most, SOME)})


def _cut(chain: list[int], number: int, flops: np.ndarray) -> Orders:
    """A chain in `number` pieces of about the same speed, at least one device each."""
    total = np.concatenate([[0.0], np.cumsum(flops[chain])])
    ends = [int(np.abs(total - total[-1] * piece / number).argmin()) for piece in range(1, number)]
    borders = [0]
    for piece, end in enumerate(ends, 1):
        borders.append(min(max(end, borders[-1] + 1), len(chain) - (number - piece)))
    borders.append(len(chain))
    return tuple(tuple(chain[a:b]) for a, b in pairwise(borders))
