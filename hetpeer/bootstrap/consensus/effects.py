"""Settings, roles and effects of raft.py, and the state that a member keeps on disk."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hetpeer.bootstrap.consensus.raft_entries import StoredEntries
from hetpeer.bootstrap.consensus.raft_messages import LogEntry, Message

SPREAD = 0.75
"""Random share that is added to the election timeout at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftConfig:
    """Settings of a member.

    `members`: those of the manifest, until a record in the log replaces them. Times in seconds.
    """

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
    """Make durable that we are in `term`, and whom we have voted for in it (None: nobody yet)."""

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
    """The entry at `place` of the log is decided.

    Entries are reported in order, each once in the life of the process.
    """

    place: int


@dataclass(frozen=True, slots=True)
class Leading:
    """We lead, and all earlier decided entries were reported: proposals may come."""

    term: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """We lead no longer. Entries that were proposed and are not decided may be decided yet, or lost."""


Effect = SaveBallot | SaveEntries | SendRaft | Decided | Leading | Deposed
