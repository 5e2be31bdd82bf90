"""The agenda: batch after batch in order, with evaluations in between and at the end.

Pure. A grouped run hands its batches out to clusters instead (bootstrap/grouped/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.effects import CoordinatorConfig, NextStep


class Agenda(Protocol):
    """Work that a coordinator is to do."""

    def take(self, ahead: int = 0) -> NextStep | None:
        """The work of the step that begins now, `ahead` steps after the next to be committed. None: there is
        none for now.

        An evaluation needs the newest parameters, so nothing is evaluated ahead. The run's first batches are
        not trained ahead if they are to be fresh.
        """

    def saves(self, version: int) -> bool:
        """Whether the state at `version` is to be stored."""

    def logged(self, record: Mapping[str, Any]) -> None:
        """Note that the coordinator has just written `record`."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do once the current version is stored."""


class SequentialAgenda:
    """All batches of the run one by one: step n trains batch n."""

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


def is_complete(config: CoordinatorConfig, history: History) -> bool:
    """Whether an exact run is trained, evaluated, and its last state stored."""
    return SequentialAgenda(config, history).over and history.stored
