"""The clusters of a grouped run, the log that they share, and volunteers that are in none of them.

Pure. All clusters know a record that one of them writes before anybody acts on it. Unassigned volunteers are
new ones, and those whose cluster has fallen apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.conduct.disputed_pairs import Conduct, DisputedPairs
from hetpeer.bootstrap.conduct.outliers import NormOutliers
from hetpeer.bootstrap.conduct.reputation import Reputation
from hetpeer.bootstrap.coordinator.handshake import Handshake
from hetpeer.bootstrap.grouped.averagings import Averagings
from hetpeer.bootstrap.grouped.cluster import Cluster, Share
from hetpeer.bootstrap.log.batches import BatchLineage
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.context import Agenda, CoordinatorContext
from hetpeer.bootstrap.state.effects import CoordinatorConfig, Disconnect, Effect, NextStep, Record, Send
from hetpeer.bootstrap.state.failed_microbatches import Failures
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.planned_seats import PlannedSeats
from hetpeer.bootstrap.state.timeouts import Leases
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.bootstrap.state.work_shares import IssueLimits


class ClusterShare(Agenda, Share, Protocol):
    """A cluster's share of the run: its work, and its questions about the others."""


class _Nothing:
    """An agenda without work."""

    over = may_save = False

    def take(self, ahead: int = 0) -> NextStep | None:  # noqa: ARG002
        return None

    def saves(self, version: int) -> bool:  # noqa: ARG002
        return False

    def logged(self, record: Mapping[str, Any]) -> None:
        """Nothing to note: it writes no records."""


class UnassignedVolunteers:
    """Volunteers without a place, in the view of all clusters in `term`."""

    def __init__(self, config: CoordinatorConfig, term: int, now: float) -> None:
        line = m.TermView(term=term, view=0, cluster=m.EVERYBODY)
        self._context = CoordinatorContext(
            config, History(whole=False), _Nothing(), line, Membership((), config.costs, only=m.EVERYBODY)
        )
        nothing_planned = PlannedSeats(self._context.history, self._context.members, now)
        self._handshake = Handshake(self._context, nothing_planned)
        self._leases = Leases(self._context, now)

    def refuse(self, peer: str, hello: m.Hello) -> list[Effect]:
        """The answer to a volunteer that cannot take part; empty if it can."""
        return self._handshake.refuse(peer, hello)

    def close(self, end: m.Finished) -> list[Effect]:
        """Tell those that wait, and those that still come, how the run ended."""
        self._context.end = end
        return [Send(peer, end) for peer in self._context.members.volunteers]

    def __len__(self) -> int:
        return len(self._context.members.volunteers)

    def __contains__(self, peer: str) -> bool:
        return peer in self._context.members.volunteers

    @property
    def peers(self) -> Collection[str]:
        """The volunteers."""
        return self._context.members.volunteers.keys()

    def enter(self, volunteer: VolunteerState, places: Sequence[m.Place]) -> list[Effect]:
        """Offer `places` to `volunteer`."""
        self._context.members.volunteers[volunteer.peer] = volunteer
        welcome = m.Welcome(line=self._context.line, version=0, member=False, places=tuple(places))
        return [Send(volunteer.peer, welcome)]

    def leave(self, peer: str) -> VolunteerState:
        """Remove and return `peer`: it has a place now, or was lost."""
        return self._context.members.volunteers.pop(peer)

    def heard(self, peer: str, now: float) -> None:
        """`peer` has sent a message, or its stream is back."""
        if peer in self:
            self._context.members.volunteers[peer].heard(now)

    def broken(self, peer: str, now: float) -> None:
        """The stream of `peer` broke; it may come back within the grace."""
        self._leases.broken(peer, now)

    def renewed(self, now: float) -> None:
        """All streams broke at once: our network process, or our line."""
        self._leases.renewed(now)

    def tick(self, now: float) -> list[Effect]:
        """Remove volunteers whose leases ran out."""
        self._leases.tick(now)
        gone = self._leases.expired(now)
        for peer in gone:
            self.leave(peer)
        return [Disconnect(peer) for peer in gone]


NOBODY = -1
"""A number that no cluster has."""
MAX_SYNC_FACTOR = 8
"""Most sync timeouts for a cluster to fetch a checkpoint (15 min): nobody stores anything meanwhile."""


class Clusters:
    """The clusters of a new term, by the log `records`, none open yet. `folds` are folded beside them."""

    def __init__(
        self,
        config: CoordinatorConfig,
        records: Iterable[Mapping[str, Any]],
        folds: Sequence[BatchLineage | Averagings],
    ) -> None:
        self._config = config
        self._folds = folds
        self._new = History(NOBODY, whole=False)
        """History of a cluster that the log does not mention."""
        self._mentioned: dict[int, History] = {}
        """Histories of clusters that the log mentions and that are not open yet."""
        self._clusters: dict[int, Cluster] = {}
        self._issue_limits = IssueLimits()
        self._reputation = Reputation()
        self._failures = Failures(elsewhere=lambda: len(self.living) > 1)
        self._conduct = Conduct()
        self._norm_outliers = NormOutliers()
        self.sync_factor = 1
        """Sync timeouts that a cluster has to fetch its parameters."""
        self.saver: Cluster | None = None
        """The cluster whose checkpoint is collected."""
        self.term = 0
        self.unused = 0
        """The number of a new cluster; none is used twice."""
        for record in records:
            if (number := record.get("cluster", 0)) not in self._mentioned:
                self._mentioned[number] = self._new.of_another(number)
            self._fold(record)
        self.term += 1

    # ── the log ─────────────────────────────────────────────────────────────────────────────────────────────

    def log(self, **record: Any) -> Record:
        """Write a record that concerns all clusters."""
        self._fold(record)
        for cluster in self:
            cluster.history.add(record)
        return Record(record)

    def logged(self, number: int, record: Mapping[str, Any]) -> None:
        """Fold a record that cluster `number` has written and folded itself."""
        self._fold(record)
        for other in self:
            if other.number != number:
                other.history.add(record)
        saves = self.saver is not None and self.saver.number == number
        if record["kind"] == "checkpoint" or (record["kind"] == "rollback" and saves):
            self.saver = None

    def _fold(self, record: Mapping[str, Any]) -> None:
        """Fold a record of the log into the histories and the cluster numbers."""
        for history in (self._new, *self._mentioned.values()):
            history.add(record)
        for book in self._folds:
            book.add(record)
        match record["kind"]:
            case "reign":
                self.term = int(record["term"])
            case "founded":
                self.unused = max(self.unused, record["cluster"] + 1)
            case "dissolved":
                self._mentioned.pop(record["cluster"], None)
            case _:
                pass

    # ── the clusters ────────────────────────────────────────────────────────────────────────────────────────

    def open(self, number: int, share: ClusterShare, now: float, *, founded: bool) -> Cluster:
        """Open cluster `number` as the log knows it, with this share of the run."""
        config, history = self._config, self._mentioned.pop(number, None) or self._new.of_another(number)
        cut = self.usual(number) if history.cut is None else [(begin, end) for begin, end in history.cut]
        members = Membership([cut], config.costs, history.departures, only=number, shared=founded)
        line = m.TermView(term=self.term, view=history.view, cluster=number)
        self.unused = max(self.unused, number + 1)
        context = CoordinatorContext(
            config,
            history,
            share,
            line,
            members,
            self._issue_limits,
            self._reputation,
            self._failures,
            DisputedPairs(self._conduct),
            norm_outliers=self._norm_outliers,
        )
        self._clusters[number] = cluster = Cluster(context, share, now, founded=founded)
        return cluster

    def usual(self, number: int) -> Sequence[Range]:
        """Cut of the blocks in cluster `number`, unless a planner has found a better one."""
        return self._config.layouts[number % len(self._config.layouts)]

    def remove(self, cluster: Cluster) -> Record:
        """Remove `cluster`, which has fallen apart."""
        del self._clusters[cluster.number]
        if cluster.late:
            self.sync_factor = min(2 * self.sync_factor, MAX_SYNC_FACTOR)
        self.saver = None if self.saver is cluster else self.saver
        return self.log(kind="dissolved", cluster=cluster.number, why=cluster.dissolved, **cluster.given_up)

    def __iter__(self) -> Iterator[Cluster]:
        return iter(self._clusters.values())

    def __getitem__(self, number: int) -> Cluster:
        return self._clusters[number]

    def get(self, number: int) -> Cluster | None:
        """Cluster `number`, or None."""
        return self._clusters.get(number)

    def of(self, peer: str) -> Cluster | None:
        """The cluster of `peer`, or None."""
        return next((cluster for cluster in self if peer in cluster.members.volunteers), None)

    @property
    def unfounded(self) -> list[Cluster]:
        """Clusters that are not founded yet and have volunteers."""
        here = [c for c in self if not c.founded and c.dissolved is None and c.members.volunteers]
        return sorted(here, key=lambda cluster: cluster.number)

    @property
    def living(self) -> list[Cluster]:
        """Founded clusters, which have parameters of their own."""
        return [cluster for cluster in self if cluster.founded]
