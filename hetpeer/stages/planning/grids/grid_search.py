"""The search for the best grid: any time, seeded. Pure except for `on`, which says when to stop.

First every beginning as it is; then annealing from the best of them, round after round, each twice as long as
the last and some of them hotter. After the first round chains of exchanges from random grids show whether the
network has structure. Where they are about as good as that annealing, it has none, and all time goes to
tries: chains of exchanges, then annealing. All of it depends on the seed alone: more time goes further on the
same path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetpeer.stages.planning.device_clusters import by_halves, chain, together
from hetpeer.stages.planning.grids import group_path
from hetpeer.stages.planning.grids.exchange_chains import ExchangeChains
from hetpeer.stages.planning.grids.grid_costs import GridCost, Prices, as_it_is, cost_of, lower_bound
from hetpeer.stages.planning.grids.group_path import EXACT_SIZE, Ints
from hetpeer.stages.planning.grids.pipeline_rows import widely
from hetpeer.stages.planning.grids.population import Annealed, GridPopulation, anneal, best_of

STARTS = 4
"""Devices at which chains begin."""
WIDTH = 32
"""Grids that are annealed together."""
STEPS = 500
"""Steps of the first round."""
HOT = (0.005, 0.02, 0.01)
"""First temperatures, round by round."""
TRIED, KICKS = 16, 50
"""Chains of a try, and kicks of each: they take half as long as STEPS steps of annealing."""
MIXED = 4
"""One of so many tries begins with what the others have found."""
NEAR = 1.03
"""Chains that cost less than this many times the first round of annealing: a network without structure."""
CLOSE = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class GridSearchResult:
    """The best grid, and the number of grids evaluated."""

    best: GridCost
    evaluations: int


def search(prices: Prices, stages: int, replicas: int, seed: int, on: Callable[[], bool]) -> GridSearchResult:
    """The best grid of `stages` groups of `replicas` devices found while `on` is true."""
    random = np.random.default_rng(seed)
    members = beginnings(prices, stages, replicas, random)
    if stages < 2:
        return GridSearchResult(cost_of(prices, members[0]), 1)
    bound = lower_bound(prices, stages, replicas) * CLOSE
    if replicas > EXACT_SIZE:
        return GridSearchResult(*widely(prices, members, random, on, bound))
    if stages > group_path.EXACT:  # ordering each takes long, and no more than these go on
        costs = [as_it_is(prices, grid.T) for grid in members]
        members = members[np.argsort(costs, kind="stable")[: WIDTH // 2]]
    population = GridPopulation(prices, members, on)
    sorted_members = population.members[np.argsort(population.costs, kind="stable")]
    best, found = best_of(population)
    evaluations, round_ = len(population), 0
    bare, tries = False, _Tries(prices, stages, replicas)
    while on() and best > bound:
        if bare:
            one = tries.anneal(random, on)
        else:
            start = _starts(sorted_members, found, random)
            steps = STEPS << round_ // len(HOT)
            one = anneal(prices, start, random, steps, HOT[round_ % len(HOT)], on)
        evaluations += one.evaluations
        if one.cost < best:
            best, found = one.cost, one.members
        if not round_ and stages <= group_path.EXACT and on():
            bare = tries.kicked(random, on) < NEAR * best
            evaluations += KICKS * TRIED
        round_ += 1
    return GridSearchResult(cost_of(prices, found), evaluations)


class _Tries:
    """Tries for networks without structure: chains of exchanges from random grids, then annealing.

    Each try is independent of the others, but every fourth begins with what the others have found.
    """

    def __init__(self, prices: Prices, stages: int, replicas: int) -> None:
        self._prices, self._shape = prices, (stages, replicas)
        self._found: list[Annealed] = []
        self._chains: ExchangeChains | None = None
        """Chains of the next try, if it has begun."""

    def kicked(self, random: np.random.Generator, on: Callable[[], bool]) -> float:
        """Begin a try: chains from random grids, or, if enough is found, from that. Returns the least cost
        of its grids, in seconds.
        """
        count = self._shape[0] * self._shape[1]
        members = [random.permutation(count).reshape(self._shape) for _ in range(TRIED)]
        if len(self._found) % MIXED == MIXED - 1:
            known = sorted(self._found, key=lambda one: one.cost)[: TRIED // 2]
            members[: len(known)] = [one.members for one in known]
        self._chains = ExchangeChains(self._prices, np.array(members, dtype=np.intp), on)
        self._chains.kick(random, KICKS, on)
        return self._chains.best[0]

    def anneal(self, random: np.random.Generator, on: Callable[[], bool]) -> Annealed:
        """One try, the one that has begun if any."""
        begun = self._chains is not None
        if self._chains is None:
            self.kicked(random, on)
        assert self._chains is not None
        members = self._chains.members[np.arange(WIDTH) % TRIED]
        self._chains = None
        one = anneal(self._prices, members, random, STEPS, max(HOT), on)
        self._found.append(one)
        return one if begun else one._replace(evaluations=one.evaluations + KICKS * TRIED)


def _starts(sorted_members: Ints, found: Ints, random: np.random.Generator) -> Ints:
    """The best grid so far, the best beginnings, and random ones."""
    known = np.concatenate([found[None], sorted_members[: WIDTH // 2 - 1]])
    shuffled = [random.permutation(found.size).reshape(found.shape) for _ in range(WIDTH - len(known))]
    return np.concatenate([known, np.array(shuffled, dtype=np.intp)])


def beginnings(prices: Prices, stages: int, replicas: int, random: np.random.Generator) -> Ints:
    """Beginnings (C, K, R): nearest-neighbour, community and halving chains by both prices, and a random one.

    Each is folded in all possible widths.
    """
    starts = random.permutation(stages * replicas)[:STARTS].tolist()
    orders = []
    for price in (prices.passing, prices.reducing):
        orders += [chain(one, start) for one in (price, together(price, random)) for start in starts]
        orders.append(by_halves(price))
    orders.append(random.permutation(stages * replicas))
    widths = [width for width in range(stages, 0, -1) if stages % width == 0]
    return np.stack([folded(order, stages, replicas, width) for order in orders for width in widths])


def folded(order: Ints, stages: int, replicas: int, width: int) -> Ints:
    """A chain laid into the grid in strips of `width` stages, pipeline after pipeline; returns (K, R).

    Neighbours in the chain are in one pipeline; with width 1 they form a stage. `width` divides `stages`.
    """
    strips = order.reshape(stages // width, replicas, width)
    return np.ascontiguousarray(strips.transpose(0, 2, 1).reshape(stages, replicas))
