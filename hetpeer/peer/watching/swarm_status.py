"""What a status consists of: run, peers, blocks and their holders, progress, credit. What is in it are claims (status_reader.py)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "hetpeer.status/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer, as it says itself."""

    peer: str
    name: str
    role: str
    state: str
    blocks: tuple[int, int] | None
    """[begin, end) of its place; held only if `holds`."""
    holds: bool
    step: int
    tokens_per_second: float
    computes: float
    """Of its time lately, that its worker computed; 0: it does not say, as the next two."""
    waits_data: float
    """That what came next was computed elsewhere, or on its way."""
    waits_room: float
    """That there was no room for what would have come of ready work, in its memory or at the next peer. The rest it waited for a step to begin."""
    device: str
    reach: str
    """public: takes connections; private: takes none; unknown; empty: it does not say."""
    reach_peers: int
    """How many peers tried, with this result."""
    relays: tuple[str, ...]
    """The ends of the ids of those through whom it is reached."""
    links: tuple[LinkRow, ...]
    """Its outgoing links, the slowest first, a few at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """What goes to another peer."""

    to: str
    """The end of its id."""
    bytes_per_second: float
    """At which bytes arrive there; 0: not known."""
    ratio: float
    """How many times smaller than in memory what is sent is."""
    saved_bytes: int
    path: str
    """direct; punched: direct, though neither end takes connections; `through` the end of a relay's id; or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One block and the peer ids of those who hold its current state."""

    block: int
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverRow:
    """Work on the task board: microbatches that wait for a holder of a block."""

    block: int
    sender: str
    """The peer that keeps them."""
    step: int
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    name: str
    id: str
    unit: str
    """What the speeds count: `tok` of text, or `samples`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    step: int
    """Updates committed."""
    steps: int
    loss: float | None
    """Of the last committed step."""
    eta_s: float | None
    """Seconds until the last step at the present speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmTotals:
    volunteers: int
    working: int
    """Volunteers that hold the current state of their blocks."""
    coordinator: bool
    """Whether one of the reliable peers coordinates."""
    tokens_per_second: float
    weakest_block: int
    """The block with the fewest holders, the first of several."""
    weakest_holders: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRow:
    """What one peer has contributed (docs/credit.md)."""

    peer: str
    name: str
    """Empty if it is not here now."""
    rank: int
    """From 1; 0: it has no credit."""
    credit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCredit:
    """In `unit` of the run, times blocks."""

    total: int
    contributors: int
    first: tuple[CreditRow, ...]
    """Who has most, a hundred at most."""
    yours: CreditRow | None
    """Of the identity of this machine, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatus:
    """Everything `hetpeer status` shows. `time` is in seconds since 1970, `state` as in docs/protocol.md."""

    time: float
    state: str
    reason: str
    """Why it does not train, in plain words; empty while it does."""
    run: RunName
    peers: tuple[PeerRow, ...]
    left: tuple[str, ...]
    """Ids of those who have said lately that they leave."""
    blocks: tuple[BlockRow, ...]
    unchecked: tuple[str, ...]
    """Peers of which no spot check can find out anything: no other holds all of their blocks. None in a run without spot checks."""
    leftovers: tuple[LeftoverRow, ...]
    progress: Progress
    swarm: SwarmTotals
    credit: RunCredit | None
    """None: no reliable peer says."""

    def document(self) -> dict[str, Any]:
        """The object of `--json`, without those who are not there."""
        fields = asdict(self)
        del fields["left"]
        return {"schema": SCHEMA, **fields}
