"""The clusters of a grouped run, and the log that they have in common.

Pure. What one of them writes all know before anybody decides what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import Conduct, DisputedPairs
from hetpeer.bootstrap.conduct.norm_outliers import NormOutliers
from hetpeer.bootstrap.conduct.reputation import Reputation
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.agenda import Agenda
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import CoordinatorConfig, Record
from hetpeer.bootstrap.state.failed_microbatches import Failures
from hetpeer.bootstrap.state.issue_limits import IssueLimits
from hetpeer.bootstrap.state.membership import Membership, Range

NOBODY = -1
"""No cluster has that number."""
MAX_SYNC_FACTOR = 8
"""Nobody stores anything while a cluster fetches what was stored: not for longer than a quarter of an hour."""


class LogFold(Protocol):
    """Something that follows from the log."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Fold one more record."""


class Clusters:
    """Of a new reign over the run whose log says `records`; none is open yet. `books` are kept beside the clusters' own histories."""

    def __init__(
        self, config: CoordinatorConfig, records: Iterable[Mapping[str, Any]], books: Sequence[LogFold]
    ) -> None:
        self._config = config
        self._books = books
        self._new = History(NOBODY, whole=False)
        """What the log tells of a cluster that it does not mention."""
        self._mentioned: dict[int, History] = {}
        """And of those that it mentions and that are not open yet."""
        self._clusters: dict[int, Cluster] = {}
        self._issue_limits = IssueLimits()
        self._reputation = Reputation()
        self._failures = Failures(elsewhere=lambda: len(self.living) > 1)
        self._conduct = Conduct()
        self._norm_outliers = NormOutliers()
        self.sync_factor = 1
        """So many times the sync time-out a cluster has to get its parameters."""
        self.saver: Cluster | None = None
        """Whose checkpoint is collected."""
        self.term = 0
        self._numbers = 0
        """How many clusters there have been. No number is used twice."""
        for record in records:
            self._mention(record.get("cluster", 0))
            self._fold(record)
        self.term += 1

    # ── the log ─────────────────────────────────────────────────────────────────────────────────────────────

    def log(self, **record: Any) -> Record:
        """Write what concerns all clusters together."""
        self._fold(record)
        for cluster in self:
            cluster.history.add(record)
        return Record(record)

    def logged(self, number: int, record: Mapping[str, Any]) -> None:
        """`number` has written `record`, and knows it."""
        self._fold(record)
        for other in self:
            if other.number != number:
                other.history.add(record)
        if record["kind"] == "checkpoint":
            self.saver = None

    def _mention(self, number: int) -> None:
        if number not in self._mentioned:
            self._mentioned[number] = self._new.of_another(number)

    def _fold(self, record: Mapping[str, Any]) -> None:
        for history in (self._new, *self._mentioned.values()):
            history.add(record)
        for book in self._books:
            book.add(record)
        match record["kind"]:
            case "reign":
                self.term = int(record["term"])
            case "founded":
                self._numbers = max(self._numbers, record["cluster"] + 1)
            case "dissolved":
                self._mentioned.pop(record["cluster"], None)
            case _:
                pass

    # ── the clusters ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def unused(self) -> int:
        """The number of a new cluster."""
        return self._numbers

    def open(self, number: int, agenda: Agenda, now: float, *, founded: bool) -> Cluster:
        """Cluster `number` as the log knows it, to do what `agenda` says."""
        config, history = self._config, self._mentioned.pop(number, None) or self._new.of_another(number)
        cut = self.usual(number) if history.cut is None else [(begin, end) for begin, end in history.cut]
        members = Membership([cut], config.costs, history.departures, only=number)
        line = m.TermView(term=self.term, view=0, cluster=number)
        self._numbers = max(self._numbers, number + 1)
        context = CoordinatorContext(
            config,
            history,
            agenda,
            line,
            members,
            self._issue_limits,
            self._reputation,
            self._failures,
            DisputedPairs(self._conduct),
            norm_outliers=self._norm_outliers,
        )
        self._clusters[number] = cluster = Cluster(context, now, founded=founded)
        return cluster

    def usual(self, number: int) -> Sequence[Range]:
        """How cluster `number` cuts the blocks, unless a planner has found otherwise."""
        return self._config.layouts[number % len(self._config.layouts)]

    def bury(self, cluster: Cluster) -> Record:
        """`cluster` has fallen apart."""
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
        """Cluster `number`, if it is there."""
        return self._clusters.get(number)

    def of(self, peer: str) -> Cluster | None:
        """The cluster in which `peer` is."""
        return next((cluster for cluster in self if peer in cluster.members.volunteers), None)

    @property
    def living(self) -> list[Cluster]:
        """Those with parameters of their own."""
        return [cluster for cluster in self if cluster.founded]
