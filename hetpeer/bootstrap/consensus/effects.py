"""Settings, roles and effects of raft.py, and the journal that keeps a member's state on disk.

The journal is an append-only file of ballots and entries, one frame after another. An entry is written with
its place. An entry at a place that is taken cuts off what was there; nothing is ever overwritten. The file is
kept as in bootstrap/log/record_log.py: a torn tail was never acknowledged, other damage is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hetpeer.bootstrap.consensus.raft_entries import StoredEntries
from hetpeer.bootstrap.consensus.raft_messages import LogEntry, Message
from hetpeer.bootstrap.log.record_log import Log

SPREAD = 0.75
"""Random share that is added to the election timeout at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftConfig:
    """Settings of a member; times in seconds. `members`: the manifest's, until a log record replaces them."""

    me: str
    members: tuple[str, ...]
    heartbeat_s: float = 0.4
    election_s: float = 1.5
    """A leader is taken to be lost when nothing was heard for this long, plus up to SPREAD times as long."""


class RaftRole(enum.Enum):
    """Role of a member. ASKING is the pre-vote: it asks whether it would be elected."""

    FOLLOWER = "follower"
    ASKING = "asking"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(slots=True)
class Durable:
    """State of a member that survives a restart."""

    term: int = 0
    voted_for: str | None = None
    entries: StoredEntries = field(default_factory=StoredEntries)


@dataclass(frozen=True, slots=True)
class SaveBallot:
    """Make durable our term and our vote in it (None: no vote yet)."""

    term: int
    voted_for: str | None


@dataclass(frozen=True, slots=True)
class SaveEntries:
    """Make durable that the log is its first `begin` entries followed by `entries`."""

    begin: int
    entries: tuple[LogEntry, ...]


@dataclass(frozen=True, slots=True)
class SendRaft:
    """Send `message` to another member. It may get lost."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Decided:
    """The entries at places `begin` to `end` - 1 are decided. Reported in order, each once in the life of the
    process.
    """

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Leading:
    """We lead, and all earlier decided entries were reported: proposals may come."""

    term: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """We lead no longer. Entries that were proposed and are not decided may be decided yet, or lost."""


Effect = SaveBallot | SaveEntries | SendRaft | Decided | Leading | Deposed


class Journal:
    """The journal of one member in the file `log`, which its opener closes."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.durable = _folded(log)
        """State at the time of opening."""

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


def _folded(frames: Iterable[dict[str, Any]]) -> Durable:
    durable = Durable()
    for frame in frames:
        if frame["kind"] == "ballot":
            durable.term, durable.voted_for = frame["term"], frame["for"]
        else:
            durable.entries.replace(frame["place"], (LogEntry(term=frame["term"], record=frame["record"]),))
    return durable
