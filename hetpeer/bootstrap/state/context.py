"""State that the coordinator's modules share: term and view, members, and more.

Pure data. Every collaborator reads it; `state` and `line` are set by coordinator/machine.py alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging.messages import Finished, TermView
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.conduct.norm_outliers import NormOutliers
from hetpeer.bootstrap.conduct.outliers import LengthOutliers
from hetpeer.bootstrap.conduct.reputation import Reputation
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.unused_work import LateWork
from hetpeer.bootstrap.state.agenda import Agenda, SequentialAgenda
from hetpeer.bootstrap.state.effects import CoordinatorConfig, CoordinatorState, Record
from hetpeer.bootstrap.state.failed_microbatches import Failures
from hetpeer.bootstrap.state.issue_limits import IssueLimits
from hetpeer.bootstrap.state.membership import Membership


@dataclass(slots=True)
class CoordinatorContext:
    """One term, from a start of the coordinator to its end."""

    config: CoordinatorConfig
    history: History
    agenda: Agenda
    line: TermView
    members: Membership
    issue_limits: IssueLimits = field(default_factory=IssueLimits)
    reputation: Reputation = field(default_factory=Reputation)
    failures: Failures = field(default_factory=Failures)
    disputed_pairs: DisputedPairs = field(default_factory=DisputedPairs)
    length_outliers: LengthOutliers = field(default_factory=LengthOutliers)
    norm_outliers: NormOutliers = field(default_factory=NormOutliers)
    late_work: LateWork = field(default_factory=LateWork)
    state: CoordinatorState = CoordinatorState.WAITING
    end: Finished | None = None
    """How the run ended, once it is FINISHED."""

    @property
    def version(self) -> int:
        """Updates that are committed."""
        return self.history.version

    @property
    def stored(self) -> bool:
        """Whether the current version lies complete in the checkpoint store."""
        return self.history.stored

    @property
    def resting(self) -> bool:
        """Whether no step runs (WAITING or SYNCING)."""
        return self.state in (CoordinatorState.WAITING, CoordinatorState.SYNCING)

    @property
    def sealed(self) -> Mapping[int, str]:
        """Block → digest of the current version's state, if the log knows it."""
        base = self.history.base
        return dict(enumerate(base["blocks"])) if base is not None and self.stored else {}

    def log(self, **record: Any) -> Record:
        """Fold `record` into the history; the effect makes it durable."""
        if self.line.cluster:
            record["cluster"] = self.line.cluster
        self.history.add(record)
        self.agenda.logged(record)
        return Record(record)


def whole_run(config: CoordinatorConfig, history: History) -> CoordinatorContext:
    """The context of a new term over a run with one history, whose batches are trained in order."""
    line = TermView(term=history.term + 1, view=history.view)
    arranged = [[(begin, end) for begin, end in layout] for layout in history.arranged]
    members = Membership(config.layouts, config.costs, history.departures, arranged=arranged)
    return CoordinatorContext(config, history, SequentialAgenda(config, history), line, members)
