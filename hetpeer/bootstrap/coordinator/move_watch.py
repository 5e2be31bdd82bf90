"""The watch over a move: its cost and the steps after it, measured, and logged beside what was promised.

Pure. A move settles with the first step at the new places, in which windows and routes are learnt anew: what
that step takes longer than the ones after it is part of the cost. The next COMPARED steps are the result. It
is comparable only if the same volunteers take part in all of them, so otherwise the log says why there is
none. Docs: planning.md, "A move pays for itself".
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect

COMPARED = 3
"""Steps after the first whose median is the result."""
LONGEST = 200
"""Characters of a reason."""


class MoveWatch:
    """At most one move that has not settled yet.

    WATCHING from `begin` (the move is in the log) until COMPARED + 1 steps are committed or `stop`; then a
    `moved` record is written.
    """

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._places: Mapping[str, Range] | None = None
        """Blocks of those who are to take part; None: nothing is watched."""
        self._stood_at: float | None = None
        """Time of the last commit before the move."""
        self._paused_s: float | None = None
        """Seconds from then to the first step at the new places; None: it has not begun."""
        self._steps: list[float] = []
        """Seconds of the steps since then."""

    def begin(self, places: Mapping[str, Range], now: float) -> None:
        """Watch the move that is now in the log: `places` are the volunteers' new blocks."""
        self._places, self._paused_s, self._steps = places, None, []
        self._stood_at = now if self._stood_at is None else self._stood_at

    def began(self, now: float) -> None:
        """A step begins at the barrier."""
        if self._places is not None and self._paused_s is None and self._stood_at is not None:
            self._paused_s = now - self._stood_at
        self._stood_at = None

    def committed(self, step: int, roster: Mapping[str, Range], now: float) -> list[Effect]:
        """Note that `step`, which `roster` took part in, is committed and logged."""
        self._stood_at = now
        if self._places is None or self._paused_s is None:
            return []
        if dict(roster) != dict(self._places):
            return self.stop("other volunteers took part before it had settled")
        self._steps.append(float(self._context.history.commits[step]["seconds"]))
        if len(self._steps) <= COMPARED:
            return []
        first_s, *compared = self._steps
        after_s = median(compared)
        return self._end(after_s=after_s, moving_s=self._paused_s + max(0.0, first_s - after_s))

    def stop(self, why: str) -> list[Effect]:
        """Give up the comparison, if there is one, because of `why`."""
        self._stood_at = None
        return [] if self._places is None else self._end(moving_s=self._paused_s, why=why[:LONGEST])

    def _end(
        self, *, after_s: float | None = None, moving_s: float | None = None, why: str = ""
    ) -> list[Effect]:
        self._places = None
        record = self._context.log(kind="moved", after_s=after_s, moving_s=moving_s, why=why)
        return [record]
