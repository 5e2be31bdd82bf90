"""The search for a grid with many pipelines: annealing of one grid. Pure except for `on`.

With hundreds of pipelines a matching for every swap is too expensive, so pipelines keep their pairs: a hop
costs what its slowest pair does, which follows from the three slowest. Now and then all pairs are matched
anew, exactly (`rematch`). A step evaluates many swaps at once and makes the first one below its limit.

The cheapest of the beginnings is matched exactly, its stages put into their best order (Eq. 4), and cooled
down in rounds, each twice as long as the last, all from the best grid so far. After each round the order is
optimized again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetpeer.stages.planning.grids import group_path
from hetpeer.stages.planning.grids.grid_costs import GridCost, Prices, as_it_is, cost_of
from hetpeer.stages.planning.grids.group_path import Floats, Ints, matched

SLOWEST = 3
"""Slowest pairs of a hop that are kept: a swap touches two rows, so one of these is left."""
NEAREST = 32
"""Candidates to replace the device at the other end of a slow pair."""
AT_ONCE = 1 << 20
"""Prices evaluated together."""


class _Swaps(NamedTuple):
    """P swaps: the device at (row, column) of `ours` with that of `theirs`; each (2, P)."""

    ours: Ints
    theirs: Ints

    def some(self, which: Ints) -> _Swaps:
        return _Swaps(self.ours[:, which], self.theirs[:, which])


class PipelineRows:
    """`grid` (R, K): pipeline by pipeline, stage by stage; R ≥ 3, K ≥ 2."""

    def __init__(self, prices: Prices, grid: Ints) -> None:
        self._reducing, self._passing = prices.reducing, prices.passing
        self.replicas, self.stages = grid.shape
        apart = prices.passing + np.diag(np.full(grid.size, np.inf))
        self._nearest = np.argpartition(apart, min(NEAREST, grid.size - 2), axis=1)[:, :NEAREST]
        self.put(grid)

    def put(self, grid: Ints) -> None:
        """Continue with this grid."""
        self.grid = grid.copy()
        self._where = np.empty((2, grid.size), dtype=np.intp)
        rows, columns = np.indices(grid.shape)
        self._where[:, grid.ravel()] = rows.ravel(), columns.ravel()
        self._to: Floats = np.stack([self._reducing[:, group].sum(axis=1) for group in grid.T], axis=1)
        """[device, stage]: its price, real or hypothetical, for reducing with all of the stage (Eq. 2)."""
        self._worst: Floats = np.array([self._most(stage) for stage in range(self.stages)])
        self._pairs: Floats = self._passing[grid[:, :-1], grid[:, 1:]]
        self._slowest = np.empty((SLOWEST, self.stages - 1), dtype=np.intp)
        self._look(range(self.stages - 1))

    @property
    def cost(self) -> float:
        """Seconds of a step (Eq. 1)."""
        return float(self._worst.max() + self._hops.sum())

    @property
    def found(self) -> GridCost:
        """The grid with its costs."""
        return GridCost(
            data_parallel_s=float(self._worst.max()),
            pipeline_s=float(self._hops.sum()),
            grid=tuple(tuple(int(device) for device in row) for row in self.grid),
        )

    @property
    def _hops(self) -> Floats:
        """Seconds of each hop, for these pairs (Eq. 3)."""
        slowest: Floats = self._pairs.max(axis=0)
        return slowest

    def _most(self, stage: int) -> float:
        return float(self._to[self.grid[:, stage], stage].max())

    def _look(self, hops: range | list[int]) -> None:
        """Update the slowest pairs of these hops."""
        for hop in hops:
            self._slowest[:, hop] = np.argpartition(-self._pairs[:, hop], SLOWEST - 1)[:SLOWEST]

    # ── joined anew ────────────────────────────────────────────────────────────────────────────────────────

    def rematch(self) -> None:
        """Match the pairs of all hops exactly, for these stages in this order (Eq. 3)."""
        grid = self.grid.copy()
        for hop in range(self.stages - 1):
            _, partners = matched(self._passing[np.ix_(grid[:, hop], grid[:, hop + 1])], self._hops[hop])
            grid[:, hop + 1 :] = grid[partners, hop + 1 :]
        self.put(grid)

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────

    def step(self, random: np.random.Generator, batch: int, heat: float) -> None:
        """Draw `batch` swaps; make the first below its limit (Metropolis et al., 1953). `heat` in seconds."""
        swaps = self._draw(random, batch)
        limit = self.cost - heat * np.log(random.random(batch))
        passing = self._passing_after(swaps)
        rest = self._worst_but(swaps)
        live = np.flatnonzero(passing + rest <= limit)[: max(1, AT_ONCE // self.replicas)]
        if not len(live):
            return
        few = swaps.some(live)
        total = passing[live] + np.maximum(rest[live], self._reducing_after(few))
        # otherwise a void swap would take the place of a real one
        changes = (few.ours != few.theirs).any(axis=0)
        below = np.flatnonzero(changes & (total <= limit[live]))
        if len(below):
            self._swap(*(int(number) for end in few for number in end[:, below[0]]))

    def _draw(self, random: np.random.Generator, batch: int) -> _Swaps:
        """Random swaps. Half of them replace a device of a slow pair by one near the pair's other end."""
        targeted = batch // 2
        hop = random.integers(self.stages - 1, size=targeted)
        row = self._slowest[random.integers(SLOWEST, size=targeted), hop]
        side = random.integers(2, size=targeted)
        stays = self.grid[row, hop + 1 - side]
        comes = self._nearest[stays, random.integers(self._nearest.shape[1], size=targeted)]
        any_row = random.integers(self.replicas, size=(2, batch - targeted))
        any_column = random.integers(self.stages, size=(2, batch - targeted))
        ours = np.concatenate([[row, hop + side], [any_row[0], any_column[0]]], axis=1)
        theirs = np.concatenate([self._where[:, comes], [any_row[1], any_column[1]]], axis=1)
        order = random.permutation(batch)
        return _Swaps(ours[:, order], theirs[:, order])

    def _passing_after(self, swaps: _Swaps) -> Floats:
        """Seconds of all hops (Eq. 4) after each swap."""
        entries = [
            (row, column + side, (column + side >= 0) & (column + side < self.stages - 1))
            for row, column in swaps
            for side in (-1, 0)
        ]
        prices = [self._pair_after(swaps, row, np.clip(hop, 0, self.stages - 2)) for row, hop, _ in entries]
        hops = self._hops
        total = np.full(swaps.ours.shape[1], hops.sum())
        for number, (_, hop, real) in enumerate(entries):
            inside = np.clip(hop, 0, self.stages - 2)
            again = np.zeros(len(total), dtype=np.bool_)
            slowest = self._others(swaps, inside)
            for other, (_, beside, there) in enumerate(entries):
                same = there & (beside == hop)
                slowest = np.where(same, np.maximum(slowest, prices[other]), slowest)
                if other < number:
                    again |= same
            total += np.where(real & ~again, slowest - hops[inside], 0.0)
        return total

    def _pair_after(self, swaps: _Swaps, row: Ints, hop: Ints) -> Floats:
        one, other = self._device_after(swaps, row, hop), self._device_after(swaps, row, hop + 1)
        prices: Floats = self._passing[one, other]
        return prices

    def _device_after(self, swaps: _Swaps, row: Ints, column: Ints) -> Ints:
        """Device at (row, column) after each of `swaps`, of which none is carried out."""
        ours, theirs = swaps
        here = (row == ours[0]) & (column == ours[1])
        there = (row == theirs[0]) & (column == theirs[1])
        devices = self.grid[row, column]
        return np.where(
            here,
            self.grid[theirs[0], theirs[1]],
            np.where(there, self.grid[ours[0], ours[1]], devices),
        )

    def _others(self, swaps: _Swaps, hop: Ints) -> Floats:
        """The slowest pair of a hop that a swap does not touch."""
        rows = self._slowest[:, hop]
        touched = np.zeros(rows.shape, dtype=np.bool_)
        for row, column in swaps:
            touched |= (rows == row) & ((column == hop) | (column == hop + 1))
        slowest: Floats = np.where(touched, -np.inf, self._pairs[rows, hop]).max(axis=0)
        return slowest

    def _worst_but(self, swaps: _Swaps) -> Floats:
        """Largest Eq. 2 of the stages that a swap does not change."""
        three = np.argsort(self._worst)[-3:]
        rest = np.zeros(swaps.ours.shape[1])
        same = swaps.ours[1] == swaps.theirs[1]
        for stage in three:
            changed = ((swaps.ours[1] == stage) | (swaps.theirs[1] == stage)) & ~same
            rest = np.where(changed, rest, np.maximum(rest, self._worst[stage]))
        return rest

    def _reducing_after(self, swaps: _Swaps) -> Floats:
        """Eq. 2 of the two stages that change; 0 where none does."""
        one, other = self.grid[swaps.ours[0], swaps.ours[1]], self.grid[swaps.theirs[0], swaps.theirs[1]]
        here, there = swaps.ours[1], swaps.theirs[1]
        both = np.maximum(self._joined(one, other, here), self._joined(other, one, there))
        return np.where(here == there, 0.0, both)

    def _joined(self, leaving: Ints, coming: Ints, stage: Ints) -> Floats:
        """The highest price of a device of `stage` if `coming` replaces `leaving`."""
        devices, price = self.grid[:, stage], self._reducing
        paid = self._to[devices, stage] + (price[coming, devices] - price[leaving, devices])
        own = self._to[coming, stage] - price[coming, leaving]
        most: Floats = np.where(devices == leaving, own, paid).max(axis=0)
        return most

    def _swap(self, row: int, column: int, other_row: int, other_column: int) -> None:
        """Exchange two devices, and update the costs that depend on them."""
        one, other = self.grid[row, column], self.grid[other_row, other_column]
        self.grid[row, column], self.grid[other_row, other_column] = other, one
        self._where[:, one], self._where[:, other] = (other_row, other_column), (row, column)
        change = self._reducing[:, other] - self._reducing[:, one]
        self._to[:, column] += change
        self._to[:, other_column] -= change
        for stage in {column, other_column}:
            self._worst[stage] = self._most(stage)
        touched = {(r, c + side) for r, c in ((row, column), (other_row, other_column)) for side in (-1, 0)}
        real = [(r, hop) for r, hop in touched if 0 <= hop < self.stages - 1]
        for r, hop in real:
            self._pairs[r, hop] = self._passing[self.grid[r, hop], self.grid[r, hop + 1]]
        self._look(sorted({hop for _, hop in real}))


PROPOSED = 512
"""Swaps in one step."""
STEPS = 1000
"""Steps of the first round."""
REMATCH = 250
"""Steps between exact matchings."""
HOT = (0.002, 0.0005)
"""First temperatures, round by round, as fractions of the cost."""
COLD = 1e-5
"""Last temperature, as a fraction of the cost."""


def widely(
    prices: Prices,
    grids: Ints,
    random: np.random.Generator,
    on: Callable[[], bool],
    bound: float,
) -> tuple[GridCost, int]:
    """(best grid from the beginnings `grids` (C, K, R) while `on` is true, number of swaps evaluated)."""
    begun = cost_of(prices, min(grids, key=lambda grid: as_it_is(prices, grid.T)))
    rows = PipelineRows(prices, np.array(begun.grid))
    best, cost, evaluations, round_ = rows.grid.copy(), rows.cost, 0, 0
    while on() and cost > bound:
        steps, hot = STEPS << round_ // len(HOT), HOT[round_ % len(HOT)]
        rows.put(best)
        for step in range(steps):
            if not on():
                break
            rows.step(random, PROPOSED, cost * hot * (COLD / hot) ** (step / steps))
            evaluations += PROPOSED
            if step % REMATCH == REMATCH - 1:
                rows.rematch()
            if rows.cost < cost:
                best, cost = rows.grid.copy(), rows.cost
        if rows.stages > group_path.EXACT and not on():
            break  # ordering so many takes long
        ordered = cost_of(prices, best.T)
        if ordered.total_s < cost:
            best, cost = np.array(ordered.grid), ordered.total_s
        round_ += 1
    rows.put(best)
    rows.rematch()
    return rows.found, evaluations
