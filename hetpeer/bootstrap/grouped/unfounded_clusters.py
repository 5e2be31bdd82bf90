"""Clusters that are not founded: the volunteers that wait in them, and which cluster is founded next.

Pure. While no cluster lives, those that wait are gathered: a complete cluster waits for others on their way,
and for a planner that divides all of them (formation.py). While others live, only clusters with open places
are divided anew. See docs/grouped.md, "Formation of clusters".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.cluster_agenda import ClusterAgendas
from hetpeer.bootstrap.grouped.cluster_list import Clusters, UnassignedVolunteers
from hetpeer.bootstrap.grouped.formation import MOVES_VERSION, Formation, Gathering
from hetpeer.bootstrap.state.effects import CoordinatorConfig, Effect
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


class UnfoundedClusters:
    """Those of `clusters` that are not founded, in one term."""

    def __init__(
        self,
        config: CoordinatorConfig,
        clusters: Clusters,
        agendas: ClusterAgendas,
        unassigned: UnassignedVolunteers,
    ) -> None:
        self._config = config
        self._clusters = clusters
        self._agendas = agendas
        self._unassigned = unassigned
        self._gathering = Gathering(config.gather_s)

    # ── who waits ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _here(self) -> frozenset[str]:
        """Volunteers that wait for their clusters to be founded."""
        return frozenset(peer for c in self._clusters.unfounded for peer in c.members.volunteers)

    @property
    def gathers(self) -> bool:
        """Whether no cluster lives, and a formation of all that wait is awaited."""
        return not self._clusters.living and self._gathering.awaits(self._here)

    @property
    def awaits_first(self) -> bool:
        """Whether volunteers wait, and no cluster lives."""
        return not self._clusters.living and bool(self._here)

    def expect(self, peers: Collection[str]) -> None:
        """Note volunteers on their way, for which the first clusters wait."""
        self._gathering.expect(peers)

    # ── dividing them ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def divisible(self) -> list[Cluster]:
        """Clusters whose volunteers may be divided anew: those not founded; while others live, only those
        with open places. None, if a volunteer speaks a version that cannot go to another cluster.
        """
        here = [c for c in self._clusters.unfounded if not self._clusters.living or c.forming]
        return here if all(c.members.speak(MOVES_VERSION, c.members.volunteers) for c in here) else []

    def seat(self, formation: Formation, clusters: Iterable[Cluster], now: float) -> list[Effect]:
        """Seat the volunteers of `clusters` as proposed; nobody is left in those."""
        waiting: dict[str, VolunteerState] = {}
        for cluster in clusters:
            here = cluster.members.volunteers
            waiting |= {peer: one.homeless() for peer, one in here.items()} if cluster.founded else here
            here.clear()
        effects: list[Effect] = []
        for seats in formation.clusters:
            cluster = self._agendas.empty(now)
            effects += cluster.seat([(waiting.pop(peer), place) for peer, place in seats])
        self._gathering.form(formation.peers)
        for volunteer in waiting.values():
            spared = volunteer.homeless()
            effects += self._unassigned.enter(spared, self._agendas.places(spared, now))
        return effects

    # ── founding one ────────────────────────────────────────────────────────────────────────────────────────

    def due(self, now: float) -> Cluster | None:
        """A complete cluster that may be founded now: another one lives, or those that wait are divided."""
        complete = next((c for c in self._clusters if not c.founded and c.complete), None)
        over = self._gathering.over(self._here, now, complete=complete is not None)
        gathered = over or bool(self._clusters.living)
        if complete is None or not gathered or not self._agendas.may_found:
            return None
        return complete

    def found(self, cluster: Cluster) -> Effect:
        """Record that `cluster` begins from the last checkpoint; the caller lets it begin."""
        number, version = cluster.number, cluster.history.checkpoint_version
        cut = cluster.members.layout(number)
        usual = [tuple(place) for place in self._clusters.usual(number)]
        own = {} if list(cut) == usual else {"layout": [list(place) for place in cut]}
        record = self._clusters.log(kind="founded", cluster=number, version=version, **own)
        self._gathering = Gathering(self._config.gather_s)  # for when all have fallen apart
        return record
