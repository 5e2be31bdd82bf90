"""A grouped run: clusters train batches of their own, and average with others that are ready about then.

Pure. Each cluster has a coordinator (cluster.py), whose volunteers work in it as in an exact run. This module
passes events on to a cluster, an averaging, or the unassigned volunteers. cluster_agenda.py decides what
clusters do next, cluster_events.py what follows for the others (docs/grouped.md, "Grouped runs").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.groups.group_scheduler import GroupPipelines
from hetpeer.bootstrap.grouped.averaging_round import AveragingRound
from hetpeer.bootstrap.grouped.averagings import Averagings
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.cluster_agenda import ClusterAgendas, GroupQueue
from hetpeer.bootstrap.grouped.cluster_events import ClusterEvents
from hetpeer.bootstrap.grouped.cluster_list import Clusters, UnassignedVolunteers
from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.grouped.recut import Recut
from hetpeer.bootstrap.grouped.unfounded_clusters import UnfoundedClusters
from hetpeer.bootstrap.log.batches import BatchLineage
from hetpeer.bootstrap.state.effects import (
    BadSample,
    CollectCheckpoint,
    CoordinatorConfig,
    CoordinatorState,
    Disconnect,
    Effect,
    Send,
    TryMicrobatch,
)
from hetpeer.bootstrap.state.volunteer_state import VolunteerState

MUTE = "it did not vote on three plans"


class GroupedRun:
    """One term over the run with the log `records`. `scheduler` knows no worker yet."""

    def __init__(
        self,
        config: CoordinatorConfig,
        records: Iterable[Mapping[str, Any]],
        scheduler: GroupPipelines,
        now: float,
    ) -> None:
        self._blocks = len(config.costs)
        self._batches = BatchLineage(config.steps)
        self._averagings = Averagings(
            config.averaging_interval, delayed=config.averaging_delayed, sparse=config.averaging_sparse
        )
        self.clusters = Clusters(config, records, (self._batches, self._averagings))
        self._agendas = ClusterAgendas(config, self.clusters, self._batches, self._averagings)
        self._agendas.begin(now)
        self._unassigned = UnassignedVolunteers(config, self.clusters.term, now)
        self._unfounded = UnfoundedClusters(config, self.clusters, self._agendas, self._unassigned)
        self._events = ClusterEvents(
            config,
            self.clusters,
            self._agendas,
            self._averagings,
            GroupQueue(scheduler),
            self._unassigned,
            self._unfounded,
        )

    def start(self) -> list[Effect]:
        """The first effects: the term is durable before anything is said in its name."""
        record = self.clusters.log(kind="reign", term=self.clusters.term)
        return [record, *(self._events.complete() if self.over else [])]

    @property
    def state(self) -> CoordinatorState:
        """TRAINING while any cluster trains or averages, otherwise WAITING until the run is FINISHED."""
        if self._events.state is CoordinatorState.FINISHED:
            return CoordinatorState.FINISHED
        trains = any(not cluster.at_rest for cluster in self.clusters.living)
        busy = trains or bool(self._averagings.under_way())
        return CoordinatorState.TRAINING if busy else CoordinatorState.WAITING

    @property
    def over(self) -> bool:
        """Whether all batches are in, averaged, evaluated and stored."""
        return self._agendas.over

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """A message of `peer` (the transport's word, not the message's)."""
        if self.state is CoordinatorState.FINISHED and not isinstance(message, m.Hello):
            return []
        if isinstance(message, m.Hello):
            return self._events.settle(self._hello(peer, message, now), now)
        cluster = self.clusters.of(peer)
        if cluster is not None:
            return self._events.settle(self._to(cluster, peer, message, now), now)
        if peer not in self._unassigned:
            return [Disconnect(peer)]  # it begins a new session, and may bring its cluster's state back
        self._unassigned.heard(peer, now)
        match message:
            case m.Claim():
                return self._events.settle(self._claim(peer, message), now)
            case m.Farewell():
                self._unassigned.leave(peer)
                return [Disconnect(peer)]
            case _:
                return []

    def _to(self, cluster: Cluster, peer: str, message: m.Message, now: float) -> list[Effect]:
        """Pass a message on to `cluster`, or to the averaging that it is about."""
        if not isinstance(message, m.OfPlan) or not message.group:
            return self._events.by(cluster, cluster.coordinator.receive(peer, message, now))
        one = self._averagings.of(cluster.number)
        if one is None or (message.line, message.group) != (cluster.line, one.number):
            return []
        cluster.coordinator.resumed(peer, now)
        return [*one.receive(peer, message, now), *self._follow_disputes(one, now)]

    def _follow_disputes(self, one: AveragingRound, now: float) -> list[Effect]:
        """Log new disputes of an averaging, and fence volunteers for it."""
        complaints = one.reduce.complaints
        told = [self.clusters.log(kind="quarrel", group=one.number, **news) for news in complaints.news()]
        return [*told, *self._fence(complaints.to_fence(), now)]

    def _fence(self, peers: Mapping[str, str], now: float) -> list[Effect]:
        """Fence `peers` (peer → reason), and ban those that were fenced too often."""
        effects: list[Effect] = []
        for peer, why in peers.items():
            if self._averagings.disputed_pairs.is_done_with(peer):
                effects.append(self.clusters.log(kind="banned", peer=peer, why=why))
            cluster = self.clusters.of(peer)
            if cluster is not None:
                effects += self._events.by(cluster, cluster.fence([peer], why, now))
        return effects

    def broken(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` broke; it may come back within the grace."""
        cluster = self.clusters.of(peer)
        if cluster is not None:
            return cluster.coordinator.broken(peer, now)
        self._unassigned.broken(peer, now)
        return []

    def resumed(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` is back and nothing was lost on the way."""
        cluster = self.clusters.of(peer)
        if cluster is not None:
            return cluster.coordinator.resumed(peer, now)
        self._unassigned.heard(peer, now)
        return []

    def saved(self, order: CollectCheckpoint, block: int, digest: str, now: float) -> list[Effect]:
        """The state of `block` that `order` asks for lies durably in the checkpoint store."""
        cluster = self.clusters.get(order.line.cluster)  # two of them may be storing
        if cluster is None:
            return []
        effects = cluster.coordinator.saved(order, block, digest, now)
        return self._events.settle(self._events.by(cluster, effects), now)

    def not_saved(self, order: CollectCheckpoint, now: float) -> list[Effect]:
        """The checkpoint could not be collected: it is tried again at the next barrier."""
        cluster = self.clusters.get(order.line.cluster)
        return [] if cluster is None else cluster.coordinator.not_saved(order, now)

    def tried(self, trial: TryMicrobatch, bad: BadSample | None, now: float) -> list[Effect]:
        """The microbatch of `trial` was computed here; None: it can be, or this machine cannot try."""
        cluster = self.clusters.get(trial.cluster)
        if cluster is None:
            return []
        effects = cluster.coordinator.tried(trial, bad, now)
        return self._events.settle(self._events.by(cluster, effects), now)

    @property
    def waiting(self) -> dict[str, tuple[int, m.Range]]:
        """Volunteers that wait for a cluster to be founded and may be divided anew → cluster and blocks."""
        here = (v for cluster in self._unfounded.divisible for v in cluster.members.volunteers.values())
        return {v.peer: (v.cluster, v.place) for v in here if v.place is not None}

    @property
    def gathers(self) -> bool:
        """Whether no cluster lives, so that founding waits for a formation."""
        return self.state is not CoordinatorState.FINISHED and self._unfounded.gathers

    @property
    def awaits_first(self) -> bool:
        """Whether volunteers wait, and no cluster lives."""
        return self.state is not CoordinatorState.FINISHED and self._unfounded.awaits_first

    def expect(self, peers: Collection[str]) -> None:
        """Volunteers that say that they are on their way: the first clusters wait for them for a while."""
        self._unfounded.expect(peers)

    def form(self, formation: Formation, now: float) -> list[Effect]:
        """A planner proposes clusters for all volunteers that wait.

        Nothing happens if others wait by now. Raises `ValueError` if the clusters do not fit the model.
        """
        if fault := formation.fault(self._blocks):
            raise ValueError(fault)
        if self.state is CoordinatorState.FINISHED or formation.peers != self.waiting.keys():
            return []
        return self._events.form(formation, now)

    @property
    def standing(self) -> dict[int, dict[str, m.Range]]:
        """Living cluster that may be divided anew → its volunteers and their blocks.

        None may while the run ends, or a division waits for its clusters.
        """
        ends = self.state is CoordinatorState.FINISHED or not self._agendas.trains_on
        return {} if ends else self._agendas.recutting.standing

    def recut(self, recut: Recut, now: float) -> list[Effect]:
        """A planner proposes to divide some living clusters anew, with all volunteers that wait.

        Nothing happens if others are there by now. Raises `ValueError` if the new clusters do not fit.
        """
        if fault := recut.formation.fault(self._blocks):
            raise ValueError(fault)
        if not recut.retiring < self.standing.keys():
            return []
        return self._events.recut(recut, now)

    def renewed(self, now: float) -> None:
        """All streams broke at once: our network process, or our line."""
        self._unassigned.renewed(now)
        for cluster in self.clusters:
            cluster.coordinator.renewed(now)

    @property
    def due_at(self) -> float:
        """End of a wait window, at which `tick` is due; infinite or past if none runs."""
        return self._events.due_at

    def tick(self, now: float) -> list[Effect]:
        """Check leases, graces and deadlines. To be called a few times a second, and at `due_at`."""
        if self.state is CoordinatorState.FINISHED:
            return []
        if moved := self._events.place_spares(now):
            return self._events.settle(moved, now)  # nothing else, or a plan might name somebody who has left
        effects = [*self._unassigned.tick(now), *self._events.settle(self._silence(now), now)]
        for cluster in list(self.clusters):
            effects += self._events.by(cluster, cluster.coordinator.tick(now))
        effects = self._events.settle(effects, now)
        effects += self._averagings.tick(now)
        return effects + self._events.tick(now)

    def _silence(self, now: float) -> list[Effect]:
        """Fence members that do not vote in their averaging."""
        effects: list[Effect] = []
        for one in self._averagings.under_way():
            effects += self._follow_disputes(one, now)
            effects += self._fence(dict.fromkeys(one.reduce.mute(one.roster(), now), MUTE), now)
        return effects

    # ── what others show of it ──────────────────────────────────────────────────────────────────────────────

    @property
    def volunteers(self) -> int:
        """Volunteers that take part, unassigned ones included."""
        return sum(cluster.coordinator.volunteers for cluster in self.clusters) + len(self._unassigned)

    def working(self) -> dict[str, m.Range]:
        """Holder of its cluster's current version → its blocks."""
        return {peer: place for c in self.clusters for peer, place in c.coordinator.working().items()}

    @property
    def missing_blocks(self) -> Sequence[int]:
        """Blocks that no cluster holds; none, as long as there is a whole cluster."""
        held = self.working().values()
        return [b for b in range(self._blocks) if not any(i <= b < j for i, j in held)]

    @property
    def done(self) -> int:
        """Batches that are trained."""
        return self._batches.known

    @property
    def last(self) -> list[Mapping[str, Any]]:
        """The record of the last commit of each cluster."""
        histories = [cluster.history for cluster in self.clusters.living]
        return [h.commits[max(h.commits)] for h in histories if h.commits]

    # ── who is where ────────────────────────────────────────────────────────────────────────────────────────

    def _hello(self, peer: str, hello: m.Hello, now: float) -> list[Effect]:
        """Begin a session: with the cluster that has room for the place `peer` held, else unassigned."""
        known, back = self.clusters.of(peer), self.clusters.get(hello.cluster)
        if refusal := self._unassigned.refuse(peer, hello):
            return refusal
        if known is not None and (older := known.coordinator.handshake.refuse(peer, hello)):
            return older
        if back is not None and (hello.place is None or not back.takes_back(peer, hello.place)):
            back = None
        effects: list[Effect] = []
        if known is not None and known is not back:
            effects = self._events.by(known, known.end_session(peer, now))
        for cluster in self.clusters:
            if cluster is not back:
                cluster.expects_no_more(peer, now)
        if peer in self._unassigned:
            self._unassigned.leave(peer)
        if back is not None:
            return effects + self._events.by(back, back.coordinator.receive(peer, hello, now))
        return effects + self._unassign(VolunteerState.of(peer, hello, now), now)

    def _claim(self, peer: str, claim: m.Claim) -> list[Effect]:
        cluster, volunteer = self.clusters.get(claim.cluster), self._unassigned.leave(peer)
        spared = None if cluster is None else cluster.enter(volunteer, claim)
        if cluster is None or spared is None:
            return self._unassign(volunteer, volunteer.heard_at)
        effects: list[Effect] = [Send(peer, m.Granted(line=cluster.line, begin=claim.begin, end=claim.end))]
        for other in spared:
            effects += self._unassign(other.homeless(), volunteer.heard_at)
        return effects

    def _unassign(self, volunteer: VolunteerState, now: float) -> list[Effect]:
        """Offer places to a volunteer that has none."""
        return self._unassigned.enter(volunteer, self._agendas.places(volunteer, now))
