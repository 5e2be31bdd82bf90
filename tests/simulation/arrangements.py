"""A planner that proposes another division of the blocks every few seconds, at random, or other clusters
of those who wait for one: the worst that there could be.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.grouped.recut import Recut
from hetpeer.bootstrap.log.moves import MovePromise
from tests.simulation.checked_swarm import CheckedSwarm

PROMISE = MovePromise(before_s=3.0, after_s=2.0, moving_s=1.0, blocks=1)
"""Whatever it is worth."""

RECUT = 0.5
"""Share of proposals that divide living clusters anew."""
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
        elif isinstance(core, GroupedRun):
            self._propose_clusters(core)
        if self._swarm.completed is None:
            self._propose_later()

    def _propose_clusters(self, core: GroupedRun) -> None:
        """Divide those who wait, or some living clusters as well; one at least stays."""
        standing, waiting, random = core.standing, sorted(core.waiting), self._random
        blocks = self._swarm.numerics.blocks
        if len(standing) > 1 and random.random() < RECUT:
            retiring = frozenset(random.sample(sorted(standing), random.randint(1, len(standing) - 1)))
            peers = sorted({*waiting, *(peer for number in retiring for peer in standing[number])})
            formation = _any_clusters(peers, blocks, random)
            self._swarm.recut(Recut(retiring=retiring, formation=formation))
        elif waiting:
            self._swarm.form(_any_clusters(waiting, blocks, random))


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


def _any_clusters(peers: list[str], blocks: int, random: Random) -> Formation:
    """Those who wait in clusters of any size with any cuts; some are spared."""
    left, clusters = random.sample(peers, len(peers)), list[list[tuple[str, Range]]]()
    while left and (not clusters or random.random() < 0.5):
        size = random.randint(1, min(blocks, len(left)))
        borders = [0, *sorted(random.sample(range(1, blocks), size - 1)), blocks]
        clusters.append([(left.pop(), place) for place in pairwise(borders)])
    return Formation(clusters=clusters, spared=frozenset(left))
