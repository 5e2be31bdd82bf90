"""DT-FM's scheduler, written anew from its paper (Yuan et al., NeurIPS 2022, arXiv 2206.01288, 3.4): a
genetic search with cyclic local moves.

A population of partitions; two parents make an offspring (five points of one are put into the other, sizes
are repaired), a local search moves devices along cycles of groups, and it takes the place of the worse parent
unless it is worse than both. Two local searches: the paper's own, which moves the device with the fastest
line inside its group to the group it is slowest to reach (fast lines belong between groups, where the
pipeline's traffic is), and the Kernighan-Lin gain that it is compared with, as the paper has it and as its
code does: there a gradient counts whole, not the part that each of R devices reduces, so it outweighs the
activations, and near devices are put into one group. (The code's own search, run on some of the networks of
scenarios/networks.py for as many offspring, came out within a few percent of these two.)
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np

from hetpeer.stages.planning.grids.grid_costs import Prices
from hetpeer.stages.planning.grids.group_path import Floats, Ints
from hetpeer.stages.planning.grids.population import GridPopulation

PARENTS, OFFSPRING, POINTS = 100, 4900, 5

Gain = Callable[[Floats, Ints, Ints], Floats]
"""(one-hot groups, groups, sizes) → what moving each device to each group is worth."""


class Moves(enum.Enum):
    """The local search."""

    FASTEST = "DT-FM"
    KERNIGHAN_LIN = "Kernighan-Lin"
    KERNIGHAN_LIN_CODE = "Kernighan-Lin, code"


class DtFm:
    """The search over K groups of R devices."""

    def __init__(self, prices: Prices, stages: int, replicas: int, seed: int, moves: Moves) -> None:
        self._prices = prices
        self._stages, self._replicas = stages, replicas
        self._devices = stages * replicas
        self._random = np.random.default_rng(seed)
        self._gain: Gain = self._fastest_inside if moves is Moves.FASTEST else self._kernighan_lin
        halves = prices.passing / 2, prices.reducing / 2
        self._apart = halves[0] - halves[1]
        if moves is Moves.KERNIGHAN_LIN_CODE:
            self._apart = -self._apart  # times a number, which decides nothing
        self._passing = halves[0]

    def run(
        self, parents: int = PARENTS, offspring: int = OFFSPRING, on: Callable[[], bool] | None = None
    ) -> float:
        """The least cost, in seconds; with `on`, of as many offspring as there are while it is true."""
        population = [
            self._random.permutation(np.repeat(np.arange(self._stages), self._replicas))
            for _ in range(parents)
        ]
        costs = [self._cost(groups) for groups in population]
        best = min(costs)
        for _ in range(offspring) if on is None else iter(on, False):
            one, other = self._random.integers(parents, size=2)
            child = self._locally(self._crossed(population[one], population[other]))
            cost = self._cost(child)
            worse = one if costs[one] > costs[other] else other
            if cost <= costs[worse]:
                population[worse], costs[worse] = child, cost
            best = min(best, cost)
        return best

    def _cost(self, groups: Ints) -> float:
        assert (np.bincount(groups, minlength=self._stages) == self._replicas).all()
        members = np.argsort(groups, kind="stable").reshape(1, self._stages, self._replicas)
        return float(GridPopulation(self._prices, members).costs[0])

    def _crossed(self, one: Ints, other: Ints) -> Ints:
        child = other.copy()
        points = self._random.permutation(self._devices)[:POINTS]
        child[points] = one[points]
        sizes = np.bincount(child, minlength=self._stages)
        for device in range(self._devices):
            if sizes[child[device]] > self._replicas:
                room = int(np.flatnonzero(sizes < self._replicas)[0])
                sizes[child[device]] -= 1
                sizes[room] += 1
                child[device] = room
        return child

    # ── local search ────────────────────────────────────────────────────────────────────────────────────────

    def _locally(self, groups: Ints) -> Ints:
        """Cycles of moves, each device once; those up to the best sum of gains are kept."""
        locked = np.zeros(self._devices, dtype=np.bool_)
        touched = np.zeros(self._stages, dtype=np.bool_)
        states, gains = [groups], [0.0]
        for _ in range(self._stages):
            cycle = self._cycle(states[-1].copy(), locked, touched)
            if cycle is None:
                break
            states.append(cycle[0])
            gains.append(gains[-1] + cycle[1])
            if touched.all():
                break
        return states[int(np.argmax(gains))]

    def _cycle(self, groups: Ints, locked: np.ndarray, touched: np.ndarray) -> tuple[Ints, float] | None:
        """A device goes to another group, one of that group goes on, until the first group is reached
        again: cut where that pays most.
        """
        moves: list[tuple[int, int]] = []
        """(device, from where)."""
        sums, closing = [0.0], []
        first = here = -1
        for _ in range(self._devices):
            gain = self._open_gains(groups, locked)
            best = gain.max(axis=1)
            if here < 0:
                if not np.isfinite(best).any():
                    return None
                first = here = int(groups[int(best.argmax())])
            inside = np.flatnonzero((groups == here) & np.isfinite(best))
            if not len(inside):
                break
            device = int(inside[best[inside].argmax()])
            there = int(gain[device].argmax())
            closing.append(float(gain[device, first]) if here != first else float("-inf"))
            sums.append(sums[-1] + float(best[device]))
            moves.append((device, here))
            locked[device], touched[there] = True, True
            groups[device] = there
            here = there
            if here == first:
                break
        if not moves:
            return None
        worth = [total + close for total, close in zip(sums, closing, strict=False)]
        if here == first:
            worth.append(sums[-1])
        cut = int(np.argmax(worth))
        for device, origin in moves[cut:]:
            groups[device] = origin
        if cut < len(moves):
            groups[moves[cut][0]] = first
        return groups, max(worth)

    def _open_gains(self, groups: Ints, locked: np.ndarray) -> Floats:
        """Of each device that may move, for each group but its own; -inf elsewhere."""
        inside = np.eye(self._stages)[groups]
        gain = self._gain(inside, groups, np.bincount(groups, minlength=self._stages))
        gain[locked] = -np.inf
        gain[np.arange(self._devices), groups] = -np.inf
        return gain

    def _fastest_inside(self, inside: Floats, groups: Ints, sizes: Ints) -> Floats:
        together = (groups[:, None] == groups[None, :]) & ~np.eye(self._devices, dtype=np.bool_)
        fastest = np.where(together, self._passing, np.inf).min(axis=1)
        gain = self._passing @ inside / np.maximum(sizes, 1) - fastest[:, None]
        movers = np.zeros(self._devices, dtype=np.bool_)
        for group in range(self._stages):
            own = np.flatnonzero(groups == group)
            if len(own):
                movers[own[fastest[own].argmin()]] = True
        return np.where(movers[:, None], gain, -np.inf)

    def _kernighan_lin(self, inside: Floats, groups: Ints, _: Ints) -> Floats:
        towards = self._apart @ inside
        return towards - towards[np.arange(self._devices), groups][:, None]
