"""Parts of a status: run, peers, blocks and their holders, progress, credit. All of it are claims
(status_summary.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "hetpeer.status/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer, as its advert says."""

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
    """Share of its recent time that its worker computed; 0: unknown, as for the next two."""
    waits_data: float
    """Share spent waiting for data that other peers computed or sent."""
    waits_room: float
    """Share spent waiting for room for results, here or at the next peer; the rest waits for a step."""
    device: str
    ram_bytes: int
    """Main memory that it offers to a place; 0: unknown, as for the next three."""
    gpu_bytes: int
    """Memory of its GPUs that it offers; 0 also if the processor computes."""
    uplink: float
    """Bytes/s that its line sends."""
    downlink: float
    """Bytes/s that its line receives."""
    up_s: float
    """Seconds for which it has been there without a break, by its own word; 0: unknown."""
    coordinate: tuple[int, ...]
    """Its network coordinate, as its advert has it; empty: unknown."""
    departures: int | None
    """How often it has left the run or was lost, by the log; None: unknown."""
    reach: str
    """public: others can connect; private: they cannot; unknown; empty: not published."""
    reach_peers: int
    """Peers that tried to connect, with this result."""
    relays: tuple[str, ...]
    """Last eight characters of the ids of its relays."""
    links: tuple[LinkRow, ...]
    """Slowest outgoing links of the peer, the slowest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """A link to another peer."""

    to: str
    """Last eight characters of its id."""
    bytes_per_second: float
    """Rate of arrival there; 0: unknown."""
    ratio: float
    """Compression: size in memory over size sent."""
    saved_bytes: int
    why: str
    """Choice of the codec, in words (`codec_reason`); empty: the run's links do not adapt."""
    trip_s: float
    """Best round trip in seconds; 0: unknown."""
    path: str
    """direct; punched: direct between two private peers; `through`, the end of a relay's id and why; or
    empty.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One block and the ids of the peers that hold its current state."""

    block: int
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverRow:
    """Leftovers on the task board: microbatches that wait for a holder of a block."""

    block: int
    sender: str
    """The peer that keeps the leftovers."""
    step: int
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    name: str
    id: str
    unit: str
    """Unit of the speeds: `tok` for text, or `samples`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    step: int
    """Updates committed."""
    steps: int
    loss: float | None
    """Loss of the last committed step."""
    eta_s: float | None
    """Seconds to the last step at the present speed."""


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
    """Credit of one peer (docs/credit.md)."""

    peer: str
    name: str
    """Name of the peer; empty if it is not in the swarm now."""
    rank: int
    """Rank from 1; 0: the peer has no credit."""
    credit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCredit:
    """Credit of the run, in its `unit` times blocks."""

    total: int
    contributors: int
    first: tuple[CreditRow, ...]
    """The hundred peers with most credit."""
    yours: CreditRow | None
    """Credit of this machine's identity, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRow:
    """A move of blocks in the run: what it promised, and what came (docs/planning.md). Seconds."""

    step: int
    """First step at the new places."""
    blocks: int
    """Blocks that were fetched."""
    before_s: float | None
    """A step before, as measured; None: none could run."""
    promised_s: float
    """A step afterwards, as promised."""
    promised_moving_s: float
    """The time without training, as promised."""
    after_s: float | None
    """A step afterwards, as measured; None: not known, as for `moving_s`."""
    moving_s: float | None
    settled: bool
    text: str
    """All of it in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatRow:
    """A place of the plan, and who is there."""

    device: str
    """Name in the plan."""
    peer: str
    """Id of the volunteer that is meant; empty: it is not there."""
    pipeline: int
    planned: tuple[int, int]
    """Blocks [begin, end) by the plan."""
    blocks: tuple[int, int] | None
    """Blocks that the volunteer has; None: none."""
    standing: str
    """`as planned`, `elsewhere`, `joining` (it has no place yet) or `not there`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
    """The plan that was given to the run beside what came of it (docs/planning.md). Seconds."""

    id: str
    since: int
    """Step at which it came into force, or at which volunteers moved to their places."""
    ended: int | None
    """Step from which blocks are divided otherwise; None: it is in force."""
    planned_s: float | None
    """A step by the planner."""
    cost: str
    """The planner's cost model: swarm, or dt-fm, which counts communication only."""
    measured_s: float | None
    """A step as measured: the median of the newest; None: too few so far."""
    seats: tuple[SeatRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatus:
    """Everything `hetpeer status` shows. `time` is in seconds since 1970, `state` as in docs/protocol.md."""

    time: float
    state: str
    reason: str
    """Reason why the run does not train, in plain words; empty while it does."""
    run: RunName
    peers: tuple[PeerRow, ...]
    left: tuple[str, ...]
    """Ids of peers that said goodbye lately."""
    blocks: tuple[BlockRow, ...]
    unchecked: tuple[str, ...]
    """Peers that no spot check can examine: nobody else holds all their blocks. Empty without spot checks."""
    leftovers: tuple[LeftoverRow, ...]
    progress: Progress
    swarm: SwarmTotals
    credit: RunCredit | None
    """None: no reliable peer answered, as for `moves`."""
    moves: tuple[MoveRow, ...] | None
    """The newest moves of blocks, the newest last."""
    plan: PlanStatus | None
    """The last plan that was given; None: none, or no reliable peer answered."""

    def document(self) -> dict[str, Any]:
        """The object of `--json`, without peers that left."""
        fields = asdict(self)
        del fields["left"]
        return {"schema": SCHEMA, **fields}
