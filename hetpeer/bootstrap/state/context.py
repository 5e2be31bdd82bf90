"""State that the coordinator's modules share: term and view, members, the agenda of the run, and more.

Pure. Every collaborator reads it; `state` and `line` are set by coordinator/machine.py alone. The agenda of a
whole run has batch after batch in order, with evaluations in between and at the end. A grouped run hands its
batches out to clusters instead (bootstrap/grouped/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hetpeer.averaging.messages import Finished, TermView
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.conduct.outliers import LengthOutliers, NormOutliers
from hetpeer.bootstrap.conduct.reputation import Reputation
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.unused_work import LateWork
from hetpeer.bootstrap.state.effects import CoordinatorConfig, CoordinatorState, NextStep, Record
from hetpeer.bootstrap.state.failed_microbatches import Failures
from hetpeer.bootstrap.state.link_targets import RatioChoice
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.work_shares import IssueLimits


class Agenda(Protocol):
    """Work that a coordinator is to do."""

    def take(self, ahead: int = 0) -> NextStep | None:
        """Work of a step that begins now, `ahead` steps after the next to be committed; None: there is none.

        Nothing is evaluated ahead, as that needs the newest parameters; nor are batches that are to be fresh.
        """

    def saves(self, version: int) -> bool:
        """Whether the state at `version` is to be stored."""

    @property
    def may_save(self) -> bool:
        """Whether a state may be stored now: one checkpoint of the run is collected at a time."""

    def logged(self, record: Mapping[str, Any]) -> None:
        """Note that the coordinator has just written `record`."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do once the current version is stored."""


class SequentialAgenda:
    """All batches of the run one by one: step n trains batch n."""

    may_save = True

    def __init__(self, config: CoordinatorConfig, history: History) -> None:
        self._config = config
        self._history = history

    def take(self, ahead: int = 0) -> NextStep | None:
        """The next batch, or an evaluation; None if neither may begin now."""
        steps, batch = self._config.steps, self._history.version + ahead
        due = self._config.evaluation_microbatches > 0 and (
            batch % self._config.evaluate_every == 0 or batch == steps
        )
        if self.over or (ahead and (due or batch < self._config.fresh_steps or batch >= steps)):
            return None
        return NextStep(batch, batch < steps, due)

    def saves(self, version: int) -> bool:
        """Whether `version` is a multiple of the interval, or the last one."""
        return version % self._config.checkpoint_every == 0 or version == self._config.steps

    def logged(self, record: Mapping[str, Any]) -> None:
        """Nothing to note: all is in the history."""

    @property
    def over(self) -> bool:
        """Whether all batches are trained and the last state is evaluated."""
        due = self._config.evaluation_microbatches
        history = self._history
        return history.version == self._config.steps and (not due or history.version in history.evaluations)


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
    ratio_choice: RatioChoice = field(default_factory=RatioChoice)
    state: CoordinatorState = CoordinatorState.WAITING
    end: Finished | None = None
    """End of the run, once it is FINISHED."""

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
    members = Membership(
        config.layouts, config.costs, history.departures, arranged=arranged, backups=history.backups
    )
    return CoordinatorContext(config, history, SequentialAgenda(config, history), line, members)


def is_complete(config: CoordinatorConfig, history: History) -> bool:
    """Whether an exact run is trained, evaluated, and its last state stored."""
    return SequentialAgenda(config, history).over and history.stored
