"""A planner that proposes another division of the blocks every few seconds, at random, or another cut for
those who wait in a forming cluster: the worst that there could be.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.grouped.cluster import Cluster, ClusterCut
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.log.moves import MovePromise
from tests.simulation.checked_swarm import CheckedSwarm

PROMISE = MovePromise(before_s=3.0, after_s=2.0, moving_s=1.0, blocks=1)
"""Whatever it is worth."""

SPARED = (0.0, 0.5, 1.0)
"""Shares of backups among the volunteers of all clusters but the first."""


class Arrangements:
    """Proposes to `swarm` every `period_s` virtual seconds on average."""

    def __init__(self, swarm: CheckedSwarm, seed: int, period_s: float) -> None:
        self._swarm = swarm
        self._random = Random(seed)
        self._period_s = period_s
        self._propose_later()

    def _propose_later(self) -> None:
        self._swarm.world.after(self._random.uniform(0.0, 2 * self._period_s), self._propose)

    def _propose(self) -> None:
        core = self._swarm.coordinator
        if isinstance(core, Coordinator):
            peers = [v.peer for v in core.members.volunteers.values() if v.place is not None]
            if peers:
                self._swarm.arrange(_any_of(peers, core.members.blocks, self._random))
        elif isinstance(core, GroupedRun) and (forming := core.forming) is not None:
            self._swarm.recut(_any_cut(forming, self._random))
        if self._swarm.completed is None:
            self._propose_later()


def _any_of(peers: list[str], blocks: int, random: Random) -> Arrangement:
    """`peers` in any order, in clusters of any size with any cuts; some are backups."""
    left = random.sample(peers, len(peers))
    layouts: list[list[Range]] = []
    seats: dict[str, tuple[int, Range]] = {}
    while left:
        size = random.randint(1, min(blocks, len(left)))
        borders = [0, *sorted(random.sample(range(1, blocks), size - 1)), blocks]
        layout = list(pairwise(borders))
        seats |= {left.pop(): (len(layouts), place) for place in layout}
        layouts.append(layout)
    spared = random.choice(SPARED)  # the first cluster works, so each block has somebody
    backups = frozenset(peer for peer, (cluster, _) in seats.items() if cluster and random.random() < spared)
    return Arrangement(layouts, seats, PROMISE, backups)


def _any_cut(forming: Cluster, random: Random) -> ClusterCut:
    """Some of those who wait, in any order, with any cut; the others are spared."""
    peers, blocks = sorted(forming.members.volunteers), forming.members.blocks
    chosen = random.sample(peers, random.randint(1, min(blocks, len(peers))))
    borders = [0, *sorted(random.sample(range(1, blocks), len(chosen) - 1)), blocks]
    seats = list(zip(chosen, pairwise(borders), strict=True))
    return ClusterCut(cluster=forming.number, seats=seats, spared=frozenset(peers).difference(chosen))
