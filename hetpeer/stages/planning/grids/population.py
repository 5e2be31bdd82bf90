"""Population annealing (Hukushima & Iba, 2003): many grids cool down together; the worse half is dropped
repeatedly.

Pure. A grid has its groups, the order of the groups, and its costs. Swaps of two devices are proposed and
accepted by their cost (Kirkpatrick et al., 1983). numpy's price for a call is that of a thousand numbers, so
C grids are evaluated side by side, each with several swaps. A swap's limit is drawn first: swaps whose bound
exceeds it are discarded, and matchings are solved only for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpeer.stages.planning.grids import group_path
from hetpeer.stages.planning.grids.grid_costs import Prices
from hetpeer.stages.planning.grids.group_path import Floats, Ints, bottlenecks, bounds

SOLVED = 96
"""Most swaps solved by matching in a step: when hot, most would be accepted, and one per grid suffices."""
AT_ONCE = 1 << 21
"""Prices evaluated together."""


class Swaps(NamedTuple):
    """P swaps: in grid `grid`, device `one` of group `here` with device `other` of group `there`.

    A swap is made if the grid then costs at most `limit`.
    """

    grid: Ints
    one: Ints
    other: Ints
    here: Ints
    there: Ints
    limit: Floats

    def some(self, which: Ints) -> Swaps:
        """The swaps with the indices `which`."""
        grid, one, other, here, there, limit = self
        return Swaps(grid[which], one[which], other[which], here[which], there[which], limit[which])


class GridPopulation:
    """Grids `members` (C, K, R): the devices of each group of each grid; K ≥ 2, R ≤ EXACT.

    Groups are named by their places in the order.
    """

    def __init__(self, prices: Prices, members: Ints, on: Callable[[], bool] = lambda: True) -> None:
        """`on` as in `reorder`."""
        self._reducing = np.ascontiguousarray(prices.reducing)
        self._passing = np.ascontiguousarray(prices.passing)
        self.members = members.copy()
        _, self.groups, self.replicas = members.shape
        self.devices = self.groups * self.replicas
        self.reorder(on)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def costs(self) -> Floats:
        """Seconds of each grid with its order (Eq. 1)."""
        costs: Floats = self._worst.max(axis=1) + self._hop.sum(axis=1)
        return costs

    def keep(self, which: Ints) -> None:
        """Keep only these grids; one that is named twice is duplicated."""
        self.members = self.members[which]
        self._refresh()

    def reorder(self, on: Callable[[], bool] = lambda: True) -> None:
        """Put the groups of each grid into their best order.

        More than can be ordered exactly get an order that is no longer, one grid after the other while `on`
        is true.
        """
        one, other = np.triu_indices(self.groups, 1)
        together = len(self) if self.groups <= group_path.EXACT else 1
        for first in range(0, len(self), together):
            if first and not on():
                break
            members = self.members[first : first + together]
            found = self._hops(
                members[:, one].reshape(-1, self.replicas), members[:, other].reshape(-1, self.replicas)
            )
            distances = np.zeros((len(members), self.groups, self.groups))
            distances[:, one, other] = distances[:, other, one] = found.reshape(len(members), len(one))
            if self.groups <= group_path.EXACT:
                orders = group_path.shortest_paths(distances)
            else:
                orders = np.array([group_path.shortest_path(distances[0], 0)])
            self.members[first : first + len(members)] = np.take_along_axis(members, orders[:, :, None], 1)
        self._refresh()

    def _refresh(self) -> None:
        """Recompute all tables from `members`."""
        grids, flat = len(self), self.members.reshape(len(self), -1)
        self._group = np.empty((grids, self.devices), dtype=np.intp)
        np.put_along_axis(self._group, flat, np.repeat(np.arange(self.groups), self.replicas)[None], axis=1)
        first = np.arange(self.groups) * self.replicas
        self._to: Floats = np.stack(
            [np.add.reduceat(self._reducing[:, grid], first, axis=1) for grid in flat]
        )
        """[grid, device, group]: its price, real or not, for reducing with all of the group (Eq. 2)."""
        self._near: Floats = np.stack(
            [np.minimum.reduceat(self._passing[:, grid], first, axis=1) for grid in flat]
        )
        """[grid, device, group]: price of its cheapest partner there."""
        own = np.take_along_axis(self._to, self._group[:, :, None], axis=2)[:, :, 0]
        self._worst: Floats = np.take_along_axis(own, flat, axis=1).reshape(self.members.shape).max(axis=2)
        """[grid, group]: Eq. 2."""
        before, behind = self.members[:, :-1], self.members[:, 1:]
        found = self._hops(before.reshape(-1, self.replicas), behind.reshape(-1, self.replicas))
        self._hop: Floats = found.reshape(grids, self.groups - 1)
        """[grid, hop]: Eq. 3."""

    def _between(self, before: Ints, behind: Ints) -> Floats:
        """Prices of (P, R) devices and (P, R) others: (R, R, P)."""
        places = before.T[:, None, :] * self.devices + behind.T[None, :, :]
        prices: Floats = self._passing.ravel().take(places)
        return prices

    def _hops(self, before: Ints, behind: Ints) -> Floats:
        size = max(1, AT_ONCE // self.replicas**2)
        pieces = [slice(begin, begin + size) for begin in range(0, len(before), size)]
        return np.concatenate([bottlenecks(self._between(before[piece], behind[piece])) for piece in pieces])

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────

    def step(self, random: np.random.Generator, batch: int, heat: Floats) -> None:
        """Draw `batch` swaps for each grid and make the first one below its limit, if any (Metropolis et al.,
        1953).

        `heat` in seconds.
        """
        swaps = self._draw(random, batch, heat)
        reducing = self._reducing_after(swaps)
        near = _Near.of(swaps, self.groups)
        kept = self._hop.sum(axis=1)[swaps.grid] - near.sum(self._hop[swaps.grid, near.hop])
        least = reducing + kept
        least += self._cheapest_partners(swaps)
        live = np.flatnonzero(least <= swaps.limit)
        live = live[_rank(swaps.grid[live]) < max(2, SOLVED // len(self))]
        if not len(live):
            return
        swaps, near, least = swaps.some(live), near.some(live), (reducing + kept)[live]
        done = self._below(swaps, near, least)
        done = done[_rank(swaps.grid[done]) < 1]
        if len(done):
            self._swap(swaps.some(done), near.some(done))

    def _draw(self, random: np.random.Generator, batch: int, heat: Floats) -> Swaps:
        grid = np.repeat(np.arange(len(self)), batch)
        count = len(grid)
        one = random.integers(self.devices, size=count)
        here = self._group[grid, one]
        there = (here + random.integers(1, self.groups, size=count)) % self.groups
        other = self.members[grid, there, random.integers(self.replicas, size=count)]
        limit = self.costs[grid] - heat[grid] * np.log(random.random(count))
        return Swaps(grid, one, other, here, there, limit)

    def _reducing_after(self, swaps: Swaps) -> Floats:
        """Maximum of Eq. 2 over all groups after each swap."""
        grid, one, other, here, there, _ = swaps
        rest = np.zeros(len(grid))
        for place in np.argsort(self._worst, axis=1)[:, -3:].T:  # the worst of the others is one of these
            group = place[grid]
            rest = np.where((group == here) | (group == there), rest, self._worst[grid, group])
        return np.maximum(
            rest, np.maximum(self._joined(grid, one, other, here), self._joined(grid, other, one, there))
        )

    def _joined(self, grid: Ints, leaving: Ints, coming: Ints, group: Ints) -> Floats:
        """The highest price of a device of `group` if `coming` replaces `leaving`."""
        devices, price = self.members[grid, group], self._reducing
        paid = self._to[grid[:, None], devices, group[:, None]] + (
            price[coming[:, None], devices] - price[leaving[:, None], devices]
        )
        own = self._to[grid, coming, group] - price[coming, leaving]
        most: Floats = np.where(devices == leaving[:, None], own[:, None], paid).max(axis=1)
        return most

    def _cheapest_partners(self, swaps: Swaps) -> Floats:
        """Lower bound for the hops beside two swapped groups: the worst device's cheapest partner in the next
        group.

        Hops between the two groups do not count.
        """
        total = np.zeros(len(swaps.grid))
        for group, apart in ((swaps.here, swaps.there), (swaps.there, swaps.here)):
            devices = self._after(swaps, group)
            for side in (-1, 1):
                beside = group + side
                real = (beside >= 0) & (beside < self.groups) & (beside != apart)
                inside = np.clip(beside, 0, self.groups - 1)
                cheapest = self._near[swaps.grid[:, None], devices, inside[:, None]].max(axis=1)
                total += np.where(real, cheapest, 0.0)
        return total

    def _after(self, swaps: Swaps, group: Ints) -> Ints:
        """The devices of a group after the swap."""
        devices = self.members[swaps.grid, group]
        one, other = swaps.one[:, None], swaps.other[:, None]
        return np.where(devices == one, other, np.where(devices == other, one, devices))

    def _below(self, swaps: Swaps, near: _Near, rest: Floats) -> Ints:
        """Indices of `swaps` that stay below their limits; `rest` is their cost without the hops `near`."""
        row, which = np.nonzero(near.real)
        hop = near.hop[row, which]
        concerned = swaps.some(which)
        costs = self._between(self._after(concerned, hop), self._after(concerned, hop + 1))
        least = rest + np.bincount(which, bounds(costs), len(rest))
        open_ = np.flatnonzero((least <= swaps.limit)[which])
        if not len(open_):
            return open_
        found = np.full(len(which), np.inf)
        found[open_] = bottlenecks(costs[:, :, open_])
        below: Ints = np.flatnonzero(rest + np.bincount(which, found, len(rest)) <= swaps.limit)
        return below

    def _swap(self, swaps: Swaps, near: _Near) -> None:
        """Make swaps, at most one for each grid."""
        grid, one, other, here, there, _ = swaps
        changed = [(group, self._after(swaps, group)) for group in (here, there)]
        self._group[grid, one], self._group[grid, other] = there, here
        change = (self._reducing[:, other] - self._reducing[:, one]).T
        self._to[grid, :, here] += change
        self._to[grid, :, there] -= change
        for group, members in changed:
            self.members[grid, group] = members
            self._near[grid, :, group] = self._passing[:, members].min(axis=2).T
            self._worst[grid, group] = self._to[grid[:, None], members, group[:, None]].max(axis=1)
        row, which = np.nonzero(near.real)
        at, hop = grid[which], near.hop[row, which]
        self._hop[at, hop] = self._hops(self.members[at, hop], self.members[at, hop + 1])


class _Near(NamedTuple):
    """The hops beside two groups that swap devices, up to four for each swap: (4, P)."""

    hop: Ints
    """0 … K - 2; arbitrary where it is not real."""
    real: NDArray[np.bool_]

    @classmethod
    def of(cls, swaps: Swaps, groups: int) -> _Near:
        low, high = np.minimum(swaps.here, swaps.there), np.maximum(swaps.here, swaps.there)
        hop = np.stack([low - 1, low, high - 1, high])
        real = (hop >= 0) & (hop < groups - 1)
        real[2] &= high - 1 != low  # two groups side by side have one hop between them
        return cls(np.clip(hop, 0, groups - 2), real)

    def some(self, which: Ints) -> _Near:
        return _Near(self.hop[:, which], self.real[:, which])

    def sum(self, values: Floats) -> Floats:
        """Sum over the real hops."""
        total: Floats = np.where(self.real, values, 0.0).sum(axis=0)
        return total


def _rank(grid: Ints) -> Ints:
    """Rank of each entry among those with the same number; equal numbers are side by side."""
    if not len(grid):
        return grid
    first = np.flatnonzero(np.concatenate([[True], grid[1:] != grid[:-1]]))
    counts = np.diff(np.append(first, len(grid)))
    return np.arange(len(grid)) - np.repeat(first, counts)


PROPOSED = 256
"""Swaps of all grids in one step."""
REORDER = 40
"""Steps between new orders of the groups."""
COLD = 1e-4
"""Last temperature, as a fraction of the cost."""


class Annealed(NamedTuple):
    """The best grid seen."""

    cost: float
    """Seconds of a step."""
    members: Ints
    """(K, R)."""
    evaluations: int
    """Swaps that were evaluated."""


def anneal(
    prices: Prices,
    members: Ints,
    random: np.random.Generator,
    steps: int,
    hot: float,
    on: Callable[[], bool],
) -> Annealed:
    """The best grid from `members` (C, K, R) in `steps` steps, or while `on` is true.

    `hot`: the first temperature, as a fraction of the cost.
    """
    population = GridPopulation(prices, members, on)
    best, found = best_of(population)
    halvings, evaluations = len(members).bit_length(), 0
    for step in range(steps):
        if not on():
            break
        heat = population.costs * hot * (COLD / hot) ** (step / steps)
        batch = max(1, min(PROPOSED, AT_ONCE // population.replicas**2) // len(population))
        population.step(random, batch, heat)
        evaluations += batch * len(population)
        if step % REORDER == REORDER - 1:
            population.reorder(on)
        cost, groups = best_of(population)
        if cost < best:
            best, found = cost, groups
        if len(population) > 1 and step * halvings // steps < (step + 1) * halvings // steps:
            population.keep(np.argsort(population.costs)[: len(population) // 2])
    return Annealed(*best_of(GridPopulation(prices, found[None])), evaluations)


def best_of(population: GridPopulation) -> tuple[float, Ints]:
    """(cost, groups (K, R)) of its cheapest grid."""
    costs = population.costs
    place = int(costs.argmin())
    return float(costs[place]), population.members[place].copy()
