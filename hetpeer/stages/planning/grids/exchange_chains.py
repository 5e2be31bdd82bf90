"""Iterated Kernighan-Lin: grids that are kicked, put right by the best exchanges of two devices, and kept if
they are no worse.

Pure. On networks without structure the worst device of a group says little about where to go, and annealing
by it is slow. A sum over all pairs of a group says more, and the best of all exchanges by that sum is known
from one table (Kernighan & Lin, 1970). It is a sum of cubes, in which slow pairs count most: the real cost
(Eq. 1 of DT-FM) is that of the worst, and decides which grids are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetpeer.stages.planning.grids.grid_costs import Prices
from hetpeer.stages.planning.grids.group_path import Floats, Ints
from hetpeer.stages.planning.grids.population import GridPopulation

POWER = 3
"""Power of the prices that are added up."""
KICK = 3
"""Random exchanges before a descent."""
RENEWED = 10
"""Kicks after which the worst grid is replaced by the best."""
NOTICED = 1e-9
"""An exchange that saves less than this fraction of the mean price is a rounding error."""


class ExchangeChains:
    """C grids that are improved side by side: `members` (C, K, R), `costs` (C) in seconds.

    In the even ones the sum is of all pairs' prices for reduces (Eq. 2). In the odd ones it is of their
    prices for activations less those for reduces, in which latency cancels out (the gain of DT-FM's code).
    Prices count by their POWER-th power.
    """

    def __init__(self, prices: Prices, members: Ints, on: Callable[[], bool]) -> None:
        """Descend from `members`; `on` as in `GridPopulation.reorder`."""
        self._prices = prices
        kinds = np.stack([prices.reducing, prices.passing - prices.reducing]) ** POWER
        self._weights: Floats = kinds[np.arange(len(members)) % 2]
        self._put(self._descended(members), on)

    def _put(self, members: Ints, on: Callable[[], bool]) -> None:
        population = GridPopulation(self._prices, members, on)
        self.members, self.costs = population.members, population.costs

    @property
    def best(self) -> tuple[float, Ints]:
        """(seconds, groups (K, R)) of the cheapest grid."""
        place = int(self.costs.argmin())
        return float(self.costs[place]), self.members[place].copy()

    def adopt(self, members: Ints, cost: float) -> None:
        """Let the worst grid go on from `members` (K, R)."""
        worst = int(self.costs.argmax())
        self.members[worst], self.costs[worst] = members, cost

    def kick(self, random: np.random.Generator, times: int, on: Callable[[], bool]) -> int:
        """Kick all grids so many times, or while `on` is true; return the number of grids evaluated."""
        for time in range(times):
            if not on():
                return time * len(self.members)
            population = GridPopulation(self._prices, self._descended(self._kicked(random)))
            found = population.costs
            kept = found <= self.costs
            self.members[kept], self.costs[kept] = population.members[kept], found[kept]
            if time % RENEWED == RENEWED - 1:
                cost, members = self.best
                self.adopt(members, cost)
        return times * len(self.members)

    def _kicked(self, random: np.random.Generator) -> Ints:
        flat = self.members.reshape(len(self.members), -1).copy()
        chains = np.arange(len(flat))
        for one, other in random.integers(flat.shape[1], size=(KICK, 2, len(flat))):
            flat[chains, one], flat[chains, other] = flat[chains, other], flat[chains, one]
        return flat.reshape(self.members.shape)

    def _descended(self, members: Ints) -> Ints:
        """The grids after the best exchange by their sums, again and again until none helps."""
        chains, groups, replicas = members.shape
        flat = members.reshape(chains, -1)
        devices = flat.shape[1]
        group = np.empty_like(flat)
        np.put_along_axis(group, flat, np.repeat(np.arange(groups), replicas)[None], axis=1)
        inside = np.eye(groups)[group]
        """[chain, device, group]: 1 if the device is in the group, else 0."""
        towards = self._weights @ inside
        """[chain, device, group]: its sum over the devices of the group."""
        noticed = -NOTICED * self._weights.mean()
        active = np.arange(chains)
        while len(active):
            weights, within = self._weights[active], inside[active].transpose(0, 2, 1)
            table = towards[active]
            gain = table @ within - np.einsum("cdk,ckd->cd", table, within)[:, :, None]
            change = gain + gain.transpose(0, 2, 1) - 2 * weights
            change[group[active, :, None] == group[active, None, :]] = 0.0
            best = change.reshape(len(active), -1).argmin(axis=1)
            one, other = np.divmod(best, devices)
            helps = change[np.arange(len(active)), one, other] < noticed
            active, one, other, weights = active[helps], one[helps], other[helps], weights[helps]
            here, there = group[active, one], group[active, other]
            group[active, one], group[active, other] = there, here
            inside[active, one], inside[active, other] = inside[active, other], inside[active, one]
            row = np.arange(len(active))
            moved = weights[row, other] - weights[row, one]
            towards[active, :, here] += moved
            towards[active, :, there] -= moved
        return np.argsort(group, axis=1, kind="stable").reshape(members.shape)
