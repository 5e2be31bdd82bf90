"""What a member of the log is told to be, what it keeps, and what it wants done: settings and effects of raft.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hetpeer.bootstrap.consensus.raft_entries import StoredEntries
from hetpeer.bootstrap.consensus.raft_messages import LogEntry, Message

SPREAD = 0.75
"""How far patience varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftConfig:
    """`members` are those of the manifest; a record in the log takes their place. Times in seconds."""

    me: str
    members: tuple[str, ...]
    heartbeat_s: float = 0.4
    election_s: float = 1.5
    """A leader is thought gone when nothing was heard for so long, and for up to SPREAD times that longer."""


class RaftRole(enum.Enum):
    """Of a member; a candidate first asks whether it would be elected."""

    FOLLOWER = "follower"
    ASKING = "asking"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(slots=True)
class Durable:
    """What a member knows again after it has died."""

    term: int = 0
    voted_for: str | None = None
    entries: StoredEntries = field(default_factory=StoredEntries)


@dataclass(frozen=True, slots=True)
class SaveBallot:
    """Make durable that we are in `term` and have voted for somebody, or for nobody yet."""

    term: int
    voted_for: str | None


@dataclass(frozen=True, slots=True)
class SaveEntries:
    """Make durable that the log is its first `begin` entries and then these."""

    begin: int
    entries: tuple[LogEntry, ...]


@dataclass(frozen=True, slots=True)
class SendRaft:
    """To another member. It may get lost."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Decided:
    """The entry at `place` of the log is decided; each is told once in a life, in order."""

    place: int


@dataclass(frozen=True, slots=True)
class Leading:
    """We lead, and everything that was decided before has been told: proposals may come."""

    term: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """We lead no longer. What was proposed and not decided may be decided yet, or lost."""


Effect = SaveBallot | SaveEntries | SendRaft | Decided | Leading | Deposed
