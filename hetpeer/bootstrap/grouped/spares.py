"""Spares: volunteers that wait in vain for a cluster of their own, and replicas that can make it complete.

Pure. While clusters live, a volunteer waits in a forming cluster for others, or for a planner to divide all
that wait (formation.py). After a while replicas of living clusters come to it if that makes the cluster
complete; otherwise it becomes a replica itself. See docs/grouped.md, "Replicas".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.cluster_agenda import ClusterAgendas
from hetpeer.bootstrap.grouped.cluster_list import Clusters, UnassignedVolunteers
from hetpeer.bootstrap.grouped.formation import MOVES_VERSION
from hetpeer.bootstrap.state.effects import Effect
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


class Spares:
    """Volunteers of one term that wait while clusters live. Times: seconds of the coordinator's clock."""

    def __init__(
        self, spare_s: float, clusters: Clusters, agendas: ClusterAgendas, unassigned: UnassignedVolunteers
    ) -> None:
        """`spare_s`: seconds that a volunteer waits."""
        self._spare_s = spare_s
        self._clusters = clusters
        self._agendas = agendas
        self._unassigned = unassigned
        self._since: dict[str, float] = {}
        """Volunteer → since when it waits."""

    def place(self, now: float) -> Iterator[tuple[Cluster, list[Effect]]]:
        """Move volunteers that have waited for long enough; yields effects with the cluster that they are of.

        Replicas come to them if that completes a cluster; otherwise they are offered places of living ones.
        One that nobody has, with a state that the store has, is offered at once.
        """
        living = self._clusters.living
        forming = [cluster for cluster in self._clusters.unfounded if cluster.forming] if living else []
        here = {peer: cluster for cluster in forming for peer in cluster.members.volunteers}
        due = self._due({*here, *self._unassigned.peers}, now)
        gaps = sum(len(cluster.gaps) for cluster in living) if here else 0
        for peer in (peer for peer in [*due, *here][: len(due) + gaps] if peer in here):
            cluster = here[peer]
            volunteer = cluster.members.volunteers.get(peer)
            if volunteer is None or cluster.rests(peer) or not cluster.forming:
                continue  # it has its offer already, is to do nothing, or others have come to it
            replicas = self._completing(cluster) if peer in due else {}
            if not replicas and (places := self._agendas.replicas(volunteer, gaps=peer not in due)):
                del cluster.members.volunteers[peer]
                yield cluster, self._unassigned.enter(volunteer.homeless(), places)
            for other in dict.fromkeys(other for other, _ in replicas.values()):
                yield other, other.release([one for of, one in replicas.values() if of is other], now)
            for place, (_, replica) in replicas.items():
                yield cluster, cluster.take(replica.homeless(), place)

    def _due(self, waiting: Collection[str], now: float) -> list[str]:
        """Those of the `waiting` that have waited for long enough, in order; others are forgotten."""
        self._since = {peer: self._since.get(peer, now) for peer in waiting}
        return sorted(peer for peer, since in self._since.items() if now - since >= self._spare_s)

    def _completing(self, forming: Cluster) -> Mapping[Range, tuple[Cluster, VolunteerState]]:
        """Open place of `forming` → a replica for it, and its cluster; empty if not all places can be filled.

        Rather a replica that has that place elsewhere.
        """
        found: dict[Range, tuple[Cluster, VolunteerState]] = {}
        if not self._agendas.trains_on:
            return found
        spare = [(cluster, replica) for cluster in self._clusters.living for replica in _replicas(cluster)]
        for place in (place for place in forming.members.places() if place.open):
            fitting = [one for one in spare if one[1].has_room(place)]
            if not fitting:
                return {}
            blocks = (place.begin, place.end)
            found[blocks] = best = min(fitting, key=lambda one: one[1].place != blocks)
            spare.remove(best)
        return found


def _replicas(cluster: Cluster) -> list[VolunteerState]:
    """Volunteers without which `cluster` still has a holder of each block; those that came last are first."""
    if not cluster.admits or not cluster.whole:
        return []
    members, staying = cluster.members, cluster.members.roster()
    found = []
    for volunteer in reversed(list(members.volunteers.values())):
        others = {peer: place for peer, place in staying.items() if peer != volunteer.peer}
        stays = bool(members.uncovered(others)) or cluster.rests(volunteer.peer)
        if not stays and members.speak(MOVES_VERSION, [volunteer.peer]):
            found.append(volunteer)
            staying = others
    return found
