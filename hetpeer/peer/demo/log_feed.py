"""Records of the coordinator's log as they are written, each with the time at which it was seen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpeer.bootstrap.log.history import History, Record
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.dht.base.runtime import Clock

RECENT = 10
"""Steps over which the present speed is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record of the log and when it was seen, in monotonic seconds."""

    at: float
    record: Record


class LogFeed:
    """Follows a log that another process writes. `poll` often: a record's time is when it was first read."""

    def __init__(self, log: Path, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._size = 0
        self.seen: list[Seen] = []
        self.history = History()

    def poll(self) -> Sequence[Seen]:
        """Read what is new. Raises `LocalError` HP-LOG-001."""
        size = self._log.stat().st_size if self._log.exists() else 0
        if size == self._size:
            return ()
        self._size = size
        now = self._clock.monotonic()
        known = len(self.seen)
        fresh = [Seen(at=now, record=record) for record in read_log(self._log)][known:]
        for one in fresh:
            self.history.add(one.record)
        self.seen += fresh
        return fresh

    def step_seconds(self, last: int | None = None) -> float:
        """Median duration of the `last` committed steps (all without it); 0 before the first."""
        durations = [float(one.record["seconds"]) for one in self.seen if one.record["kind"] == "commit"]
        return statistics.median(durations[-last:] if last else durations) if durations else 0.0


def recovery_seconds(seen: Sequence[Seen], killed_at: float) -> float | None:
    """Seconds that the swarm lost by a kill at `killed_at`; None if it had not recovered by the end of the
    log.

    From the kill to the commit of the first step that *began* after it, less the median duration of the steps
    before the kill: such a step is planned without the dead volunteer, so its commit says that the swarm is
    whole again. A step begins when the one before it is committed, or at a roll-back. A swarm that notices
    nothing has between 0 and one step's duration, the rest of the step in which the kill fell.
    """
    usual = [float(s.record["seconds"]) for s in seen if s.record["kind"] == "commit" and s.at <= killed_at]
    began = False
    for one in seen:
        if one.at <= killed_at:
            continue
        if one.record["kind"] == "commit" and began:
            return max(0.0, one.at - killed_at - (statistics.median(usual) if usual else 0.0))
        began = began or one.record["kind"] in {"commit", "rollback"}
    return None
