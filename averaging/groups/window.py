"""How long the first that is ready waits for others: SDPipe's window T (3.2, 3.4). Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

LONGER, SHORTER = 2.0, 0.9
"""What a group of one, and any other, makes of the window (as in the artifact, preduce_handler.cc)."""
LEAST = 0.01
"""N-ths of an iteration."""
SMOOTH = 0.2
"""Weight of the last iteration in the mean of them."""


class Window:
    """T is `seconds`, whatever happens: infinite for all-reduce, 0 for local updates."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self, present: int) -> float:
        """T, where `present` workers take part."""
        return self._seconds if present > 1 else 0.0

    def arrived(self, worker: str, now: float) -> None:
        """`worker` is ready."""

    def formed(self, group: Collection[str], present: int, now: float) -> None:
        """`group` has been formed, of `present` workers."""

    def left(self, worker: str) -> None:
        """`worker` is gone."""


class Bounded(Window):
    """Doubled after a group of one, a tenth less after any other, within bounds in seconds: the artifact's."""

    def __init__(self, start: float, least: float, most: float) -> None:
        super().__init__(start)
        self._least, self._most = least, most

    def formed(self, group: Collection[str], present: int, now: float) -> None:  # noqa: ARG002 - as every window
        self._seconds = min(max(self._seconds * _change(group), self._least), self._most)


class Adaptive(Window):
    """The same in N-ths of an iteration, whatever that takes: from one on, which is the paper's T, to a whole iteration.

    An iteration is the mean time from a worker's group to its next arrival. Nobody waits before that is known.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self._factor = 1.0
        self._iteration = math.nan
        self._since: dict[str, float] = {}

    def seconds(self, present: int) -> float:
        known = present > 1 and not math.isnan(self._iteration)
        return self._iteration * self._factor / present if known else 0.0

    def arrived(self, worker: str, now: float) -> None:
        since = self._since.pop(worker, None)
        if since is not None:
            took, known = now - since, not math.isnan(self._iteration)
            self._iteration = self._iteration + SMOOTH * (took - self._iteration) if known else took

    def formed(self, group: Collection[str], present: int, now: float) -> None:
        self._factor = min(max(self._factor * _change(group), LEAST), float(present))
        self._since |= dict.fromkeys(group, now)

    def left(self, worker: str) -> None:
        self._since.pop(worker, None)


def _change(group: Collection[str]) -> float:
    return LONGER if len(group) < 2 else SHORTER
