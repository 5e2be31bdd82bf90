"""hetpeer with a watch on its event loop: the same command line, and how late its timers are.

`python -m benchmarks.loop_lag bootstrap …` appends JSON to the file that $HETPEER_LOOP_LAG names, a line each
second: the monotonic time, and for each moment PERIOD_S apart the milliseconds by which the loop came late. A
loop that stands still for a second is late at all moments of that second.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.service.sessions import VolunteerSessions

VARIABLE = "HETPEER_LOOP_LAG"
PERIOD_S, LINE_S = 0.01, 1.0


class LoopWatch:
    """Watches the running loop from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._due = time.monotonic() + PERIOD_S
        self._next_line = self._due + LINE_S
        self._lags: list[float] = []
        self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        now = time.monotonic()  # the loop's own time stands still while a callback runs
        while self._due <= now:
            self._lags.append(round((now - self._due) * 1e3, 2))
            self._due += PERIOD_S
        if now >= self._next_line:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": now, "lags": self._lags}) + "\n")
            self._lags, self._next_line = [], now + LINE_S
        self._loop.call_later(PERIOD_S, self._look)


def lags_between(path: Path, begin: float, end: float) -> list[float]:
    """Milliseconds, in order of size; `begin` and `end` by the monotonic clock."""
    lines: Iterable[dict[str, Any]] = map(json.loads, path.read_text().splitlines())
    return sorted(lag for line in lines if begin < line["time"] <= end for lag in line["lags"])


def watch_the_coordinator() -> None:
    """Begin to watch with the first coordinator of this process, on its loop."""
    construct = VolunteerSessions.__init__

    def construct_and_watch(self: VolunteerSessions, *arguments: Any) -> None:
        construct(self, *arguments)
        VolunteerSessions.__init__ = construct  # type: ignore[method-assign]
        LoopWatch(Path(os.environ[VARIABLE]))

    VolunteerSessions.__init__ = construct_and_watch  # type: ignore[method-assign]


if __name__ == "__main__":
    from hetpeer.peer.cli.main import run

    watch_the_coordinator()
    run()
