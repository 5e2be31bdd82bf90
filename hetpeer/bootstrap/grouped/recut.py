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
from hetpeer.bootstrap.grouped.mean_order import MeanOrder
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

    Retiring clusters take no batch from their next barrier on. Once all stand still, they average with the
    first cluster that stays and comes to a barrier. Nothing of them would be lost then, and they fall apart
    together. If one falls apart by itself, or somebody comes or goes, the proposal is dropped; they go on.
    """

    def __init__(
        self, clusters: Clusters, batches: BatchLineage, averagings: Averagings, order: MeanOrder
    ) -> None:
        self._clusters = clusters
        self._batches = batches
        self._averagings = averagings
        self._order = order
        self._recut: Recut | None = None
        self._until = 0.0
        self._company: int | None = None
        """A cluster that stays and has stopped to average with those that retire."""

    def propose(self, recut: Recut, now: float) -> None:
        """Note a proposal in the place of an earlier one."""
        self._recut, self._until, self._company = recut, now + WAIT_S, None
        if self._averagings.sparse and not self._averagings.under_way():
            self._averagings.called = True

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

    @property
    def held(self) -> frozenset[int]:
        """Clusters that take no batch for the proposal's sake."""
        return self.pending.union(() if self._company is None else (self._company,))

    def drop(self) -> None:
        """Drop the proposal, if there is one."""
        self._recut = self._company = None

    def holds(self, number: int) -> bool:
        """Whether cluster `number` takes no further batch. One that stays does if it is needed to average."""
        if self._recut is None:
            return False
        if self._company is not None and not self._may_join(self._company):
            self._company = None
        if (
            self._company is None
            and number not in self.pending
            and self._may_join(number)
            and self._uncovered()
        ):
            self._company = number
        return number in self.held

    def together(self) -> list[Cluster]:
        """Clusters that are to average now: those that retire with one that stays; empty if not all stand."""
        lacking = self._uncovered()
        staying = [c for c in self._clusters.living if lacking and c.number not in self.pending]
        ready = [c for c in staying if self._may_join(c.number) and self._stops(c)]
        if not ready:
            return []
        other = min(ready, key=lambda cluster: cluster.number != self._company)
        self._company = None
        return [*lacking, other]

    def _uncovered(self) -> list[Cluster]:
        """Retiring clusters with batches that none has, or will have, which stays; once all stand still.

        Sparse averagings are of all clusters, and need no company.
        """
        retiring = [self._clusters[number] for number in sorted(self.pending) if self._clusters.get(number)]
        still = all(c.whole and c.at_rest and not self._averagings.busy(c.number) for c in retiring)
        if self._averagings.sparse or not still:
            return []
        leaving = self.pending
        return [c for c in retiring if not self._batches.are_elsewhere(c.number, leaving, promised=True)]

    def _may_join(self, number: int) -> bool:
        """Whether cluster `number` can average now, or at its next barrier."""
        cluster = self._clusters.get(number)
        return cluster is not None and cluster.whole and not self._averagings.busy(number)

    def _stops(self, cluster: Cluster) -> bool:
        """Whether `cluster` is at a barrier, or need not be."""
        return cluster.at_rest or self._order.overlaps(cluster)

    def due(self, waiting: Collection[str], now: float) -> Recut | None:
        """The proposal if it can take effect now: `waiting` volunteers are in no living cluster."""
        recut = self._recut
        if recut is None:
            return None
        living = {cluster.number: cluster for cluster in self._clusters.living}
        if now > self._until or not recut.retiring < living.keys():
            self.drop()
            return None
        retiring = [living[number] for number in sorted(recut.retiring)]
        here = {peer for cluster in retiring for peer in cluster.members.volunteers}
        if here.union(waiting) != recut.formation.peers:
            self.drop()
            return None
        if not all(self._stands(cluster, recut.retiring) for cluster in retiring):
            return None
        self.drop()
        return recut

    def _stands(self, cluster: Cluster, retiring: Collection[int]) -> bool:
        """Whether `cluster` can fall apart, and nobody waits for it."""
        busy = self._averagings.busy(cluster.number) or self._clusters.saver is cluster
        return cluster.at_rest and not busy and self._is_covered(cluster.number, retiring)

    def _is_covered(self, number: int, retiring: Collection[int]) -> bool:
        """Whether all batches in cluster `number` are in clusters that stay, too."""
        return self._batches.are_elsewhere(number, retiring)
