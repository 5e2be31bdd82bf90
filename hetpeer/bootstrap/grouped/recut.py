"""Living clusters that are to be divided anew, until they stand where that costs no batch.

Pure. A planner proposes it (cluster_recuts.py). See docs/grouped.md, "Living clusters".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.grouped.averagings import Averagings
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.cluster_list import Clusters
from hetpeer.bootstrap.grouped.formation import MOVES_VERSION, Formation
from hetpeer.bootstrap.log.batches import BatchLineage

WHY = "its volunteers form other clusters"
"""Reason of a cluster that falls apart for others."""
WAIT_S = 900.0
"""A proposal is dropped if its clusters have not stood still together within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """A planner's proposal."""

    retiring: frozenset[int]
    """Living clusters that fall apart; at least one other stays."""
    formation: Formation
    """New clusters of their volunteers and of all that wait."""


class Recutting:
    """At most one proposal that waits for its clusters.

    A retiring cluster trains until it is to average, and takes no batch from then on. After an averaging with
    a cluster that stays nothing of it would be lost. Once that is so for all, they fall apart together. If
    one falls apart by itself, or somebody comes or goes, the proposal is dropped, and they go on.
    """

    def __init__(self, clusters: Clusters, batches: BatchLineage, averagings: Averagings) -> None:
        self._clusters = clusters
        self._batches = batches
        self._averagings = averagings
        self._recut: Recut | None = None
        self._until = 0.0

    def propose(self, recut: Recut, now: float) -> None:
        """Note a proposal in the place of an earlier one."""
        self._recut, self._until = recut, now + WAIT_S

    @property
    def standing(self) -> dict[int, dict[str, Range]]:
        """Living cluster that may be divided anew → its volunteers and their blocks; none while one waits."""
        return {
            cluster.number: {peer: v.place for peer, v in cluster.members.volunteers.items() if v.place}
            for cluster in ([] if self._recut else self._clusters.living)
            if cluster.whole and cluster.members.speak(MOVES_VERSION, cluster.members.volunteers)
        }

    @property
    def pending(self) -> frozenset[int]:
        """Clusters that are to fall apart."""
        return frozenset() if self._recut is None else self._recut.retiring

    def drop(self) -> None:
        """Drop the proposal, if there is one."""
        self._recut = None

    def holds(self, number: int) -> bool:
        """Whether cluster `number` takes no further batch."""
        if self._recut is None or number not in self._recut.retiring:
            return False
        cluster = self._clusters[number]
        averages = self._averagings.busy(number) or self._averagings.due(number, cluster.history.version)
        return averages or self._is_covered(number, self._recut.retiring)

    def due(self, waiting: Collection[str], now: float) -> Recut | None:
        """The proposal if it can take effect now: `waiting` volunteers are in no living cluster."""
        recut = self._recut
        if recut is None:
            return None
        living = {cluster.number: cluster for cluster in self._clusters.living}
        if now > self._until or not recut.retiring < living.keys():
            self._recut = None
            return None
        retiring = [living[number] for number in sorted(recut.retiring)]
        here = {peer for cluster in retiring for peer in cluster.members.volunteers}
        if here.union(waiting) != recut.formation.peers:
            self._recut = None
            return None
        if not all(self._stands(cluster, recut.retiring) for cluster in retiring):
            return None
        self._recut = None
        return recut

    def _stands(self, cluster: Cluster, retiring: Collection[int]) -> bool:
        """Whether `cluster` can fall apart, and nobody waits for it."""
        busy = self._averagings.busy(cluster.number) or self._clusters.saver is cluster
        return cluster.at_rest and not busy and self._is_covered(cluster.number, retiring)

    def _is_covered(self, number: int, retiring: Collection[int]) -> bool:
        """Whether all batches in cluster `number` are in clusters that stay, too."""
        return self._batches.are_elsewhere(number, retiring)
