"""The journal of a member: its ballots and entries, one frame after another in an append-only file.

An entry is written with its place. An entry at a place that is taken cuts off what was there; nothing is ever
overwritten. Files are kept as in bootstrap/log/record_log.py: a torn tail was never acknowledged, and damage
to anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.consensus.effects import Durable, SaveBallot, SaveEntries
from hetpeer.bootstrap.consensus.raft_messages import LogEntry
from hetpeer.bootstrap.log.record_log import Log


class Journal:
    """The journal of one member, open for this process alone."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.durable = _folded(log)
        """The state when it was opened."""

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open the journal at `path`. Raises `LocalError` as `Log.open` does."""
        return cls(Log.open(path))

    def save(self, effect: SaveBallot | SaveEntries) -> None:
        """Make `effect` durable. Raises `LocalError` HP-DISK-002 (or 001); then nothing of it is written."""
        match effect:
            case SaveBallot(term, voted_for):
                self._log.append({"kind": "ballot", "term": term, "for": voted_for})
            case SaveEntries(begin, entries):
                frames = [
                    {"kind": "entry", "place": place, "term": entry.term, "record": entry.record}
                    for place, entry in enumerate(entries, begin)
                ]
                self._log.append(*frames)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def _folded(frames: Iterable[dict[str, Any]]) -> Durable:
    durable = Durable()
    for frame in frames:
        if frame["kind"] == "ballot":
            durable.term, durable.voted_for = frame["term"], frame["for"]
        else:
            durable.entries.replace(frame["place"], (LogEntry(term=frame["term"], record=frame["record"]),))
    return durable
