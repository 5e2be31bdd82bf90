"""Every message between a volunteer and the coordinator, and the headers of tensors between volunteers.

One schema, validated at the border: `decode` gives a typed message or ProtocolError, never anything else. Unknown
fields are ignored so that a newer minor version can add some; an unknown wire version is refused by name at the
handshake (`Hello`). Numbers are bounded, lists too: a peer's claim about itself is never trusted for its size.
Who sent a message comes from the transport, not from the message.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hetpeer.dht.errors import ProtocolError
from hetpeer.dht.plain import unpack
from hetpeer.stages.execution.routes import Hop

WIRE_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 1 << 20

Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Block = Annotated[int, Field(ge=0, lt=1 << 16)]
Id = Annotated[int, Field(ge=0, lt=1 << 32)]
Peer = Annotated[str, Field(min_length=1, max_length=128)]
Digest = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=500)]
Ids = Annotated[tuple[Id, ...], Field(max_length=1 << 16)]
Peers = Annotated[tuple[Peer, ...], Field(max_length=1 << 8)]
Range = tuple[Block, Block]
Event = Annotated[str, Field(max_length=1 << 19, pattern=r"^[^\n]*$")]
"""A signed line (bootstrap/eventlog.py), one and not several: it is kept among others."""
Ticket = Annotated[bytes, Field(max_length=2048)]
Share = Annotated[int, Field(ge=1, lt=1 << 32)]
Speed = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Of a microbatch, nats per token: a worker gives no other, as it refuses what is not finite."""


class Schema(BaseModel):
    """Frozen, and open to fields of later versions."""

    model_config = ConfigDict(frozen=True, extra="ignore")


EVERYBODY: Final = 1 << 32
"""In place of a cluster in a line: that of the groups that average."""


class Line(Schema):
    """The line of history a message belongs to; anything of another line changes nothing (fencing).

    In a grouped run every cluster has a history of its own (docs/averaging.md), else there is one, 0.
    """

    term: Count
    view: Count
    cluster: Count = 0


class Entrant(Schema):
    """A volunteer of a running step: the blocks [begin, end) that it holds there."""

    peer: Peer
    incarnation: Count
    begin: Block
    end: Block


class Task(Schema):
    """One microbatch on its way: `id`, its hops from the receiver on, and how often it was handed out."""

    id: Id
    route: Annotated[tuple[Hop, ...], Field(min_length=1, max_length=256)]
    attempt: Count = 0


class Contents(Schema):
    """What a slot holds at the blocks [begin, end): the ids whose gradients it is the sum of."""

    begin: Block
    end: Block
    ids: Ids


class Held(Schema):
    """A block's state in a volunteer's memory: its version and the digest of its bits."""

    block: Block
    version: Count
    digest: Digest


class BlockVote(Schema):
    """A holder's word on a reduced gradient: the digest of its bits and its squared 2-norm in float64."""

    block: Block
    digest: Digest
    squared_norm: Annotated[float, Field(ge=0)]
    finite: bool


class Cover(Schema):
    """The exact cover of one block: (holder, ids) of the sums in the order in which they are added, and who does what.

    `reducers` are (peer, share): they sum consecutive parts of the block's flat gradient, of lengths that are to each other as their shares;
    `receivers` get every shard's sum, `observers` those with elements of a parameter that is tied to one of theirs.
    """

    block: Block
    slots: Annotated[tuple[tuple[Peer, Ids], ...], Field(min_length=1)]
    reducers: Annotated[tuple[tuple[Peer, Share], ...], Field(min_length=1)]
    receivers: Annotated[tuple[Peer, ...], Field(min_length=1)]
    observers: tuple[Peer, ...] = ()


class Place(Schema):
    """A place of the plan: the blocks [begin, end) of cluster `cluster` and what they ask of a machine."""

    cluster: Count
    begin: Block
    end: Block
    memory_bytes: Count
    flops: float
    holders: Count
    """How many volunteers hold or prepare the least held of these blocks."""
    departures: Count = 0
    """How often those volunteers have gone before, all together; of several such blocks the worst."""
    open: bool


# ── volunteer → coordinator ──────────────────────────────────────────────────────────────────────────────────────


class Hello(Schema):
    """First message of every control stream. `held` is what the volunteer has in memory, if it comes back."""

    kind: Literal["hello"] = "hello"
    wire_version: Count = WIRE_VERSION
    run: Text
    incarnation: Count
    name: Text = ""
    memory_bytes: Count = 0
    flops_per_second: Speed = 0.0
    place: Range | None = None
    cluster: Count = 0
    """Of the line that it was on."""
    held: tuple[Held, ...] = ()
    voucher: Annotated[bytes, Field(max_length=512)] = b""
    """Of the invite by which it came, if the run asks for one (bootstrap/vouchers.py)."""
    work: Annotated[bytes, Field(max_length=8)] = b""
    """Its proof of work, if the run asks for one (bootstrap/proofofwork.py)."""


class Claim(Schema):
    """The volunteer has chosen this open place."""

    kind: Literal["claim"] = "claim"
    cluster: Count
    begin: Block
    end: Block


class Prepared(Schema):
    """Graphs are loaded, the worker runs: state may be fetched at the next step border.

    `flops_per_second` is what the device reaches on these blocks; that of Hello is its guess before it had them.
    """

    kind: Literal["prepared"] = "prepared"
    flops_per_second: Speed = 0.0


class Ready(Schema):
    """The state of `version` is loaded; `held` proves it."""

    kind: Literal["ready"] = "ready"
    line: Line
    version: Count
    held: tuple[Held, ...]


class Sealed(Schema):
    """A sealed slot; `losses` are those of the ids that ended here (last block only)."""

    kind: Literal["sealed"] = "sealed"
    line: Line
    step: Count
    slot: Count
    contents: tuple[Contents, ...]
    losses: dict[Id, Loss] = {}


class Evaluated(Schema):
    """Losses of evaluation microbatches that ended here."""

    kind: Literal["evaluated"] = "evaluated"
    line: Line
    step: Count
    losses: dict[Id, Loss]


class Failed(Schema):
    """A microbatch could not be computed here. `given`: who had sent what is wrong with it, if it is that and not the microbatch."""

    kind: Literal["failed"] = "failed"
    line: Line
    step: Count
    id: Id
    why: Text
    given: Annotated[str, Field(max_length=128)] = ""


class OfPlan(Schema):
    """Of plan `plan` of a reduce: that of step `step`, or, with `group` above 0, of that averaging; then `step` is a version."""

    line: Line
    step: Count
    group: Count = 0
    plan: Count


class Vote(OfPlan):
    """The reduced gradients of plan `plan` have arrived and look like this."""

    kind: Literal["vote"] = "vote"
    blocks: tuple[BlockVote, ...]


class Reducing(OfPlan):
    """Shards of plan `plan` arrive here: it goes on, however long it takes."""

    kind: Literal["reducing"] = "reducing"


class Objection(OfPlan):
    """What `peer` sent of `block` for plan `plan` cannot be added, and `why`: the sum is not made."""

    kind: Literal["objection"] = "objection"
    block: Block
    peer: Peer
    why: Text


class Checked(Schema):
    """For spot check `check` microbatch `id` has been computed once more here, from block `begin` on."""

    kind: Literal["checked"] = "checked"
    line: Line
    step: Count
    check: Count
    id: Id
    begin: Block


class Compared(Schema):
    """For spot check `check`: the bundle that enters block `border` of microbatch `id`, or with `back` its gradient, has come from the checker `peer`.
    What others had sent in its place is `alike`, or it is not.
    """

    kind: Literal["compared"] = "compared"
    line: Line
    step: Count
    check: Count
    id: Id
    border: Block
    back: bool
    peer: Peer
    alike: Peers = ()
    differ: Peers = ()


class Given(Schema):
    """Of what was used in computing `id` from block `begin` on: the digest of the bundle that `peer` had sent, or with `back` of the gradient."""

    id: Id
    begin: Block
    back: bool
    peer: Annotated[str, Field(max_length=128)]
    digest: Annotated[bytes, Field(max_length=32)]


class Mark(Schema):
    """The fingerprint of elements [begin, end) of the sum at `block` (stages/execution/fingerprint.py) under `key`."""

    block: Block
    begin: Count
    end: Count
    key: Annotated[bytes, Field(max_length=16)]
    values: Annotated[bytes, Field(max_length=1 << 11)] = b""


class Shown(Schema):
    """Fingerprints for spot check `check`: of what we have received under `plan` as reducer, or of what we have computed once more; and of what
    that, or what we count, was computed from.
    """

    kind: Literal["shown"] = "shown"
    line: Line
    step: Count
    check: Count
    plan: Count
    marks: Annotated[tuple[Mark, ...], Field(max_length=1 << 12)]
    given: Annotated[tuple[Given, ...], Field(max_length=1 << 13)] = ()


class Applied(Schema):
    """The update of `step` is applied; `event` is the signed line of the volunteer's own log."""

    kind: Literal["applied"] = "applied"
    line: Line
    step: Count
    held: tuple[Held, ...]


class Paced(Schema):
    """How fast things go here, once a step: what the next step's links aim at (stages/links/adaptive.py).

    `computing`: seconds of a microbatch at this place. `links`: seconds that the largest bundle of a microbatch would
    take to each peer uncompressed, by the rate at which bytes last arrived there. `uplink`: bytes/s of all links together; 0: not known.
    """

    kind: Literal["paced"] = "paced"
    computing: Speed
    links: dict[Peer, Speed]
    uplink: Speed = 0.0


class Farewell(Schema):
    """The volunteer leaves and will not answer any more."""

    kind: Literal["farewell"] = "farewell"


class Heartbeat(Schema):
    """Sent both ways every second: a frozen or cut-off peer sends no reset."""

    kind: Literal["heartbeat"] = "heartbeat"


class EventLine(Schema):
    """A signed line of the volunteer's event log, kept by the coordinator for the audit."""

    kind: Literal["event"] = "event"
    line: Event


# ── coordinator → volunteer ──────────────────────────────────────────────────────────────────────────────────────


class Kept(Schema):
    """Said once in a session, after Hello: the last line of the volunteer that is kept here (empty: none); it sends those after it."""

    kind: Literal["kept"] = "kept"
    last: Event


class Amended(Schema):
    """Said after Hello, and when it is new: the latest amendment of the manifest (bootstrap/amendment.py), if there is one."""

    kind: Literal["amended"] = "amended"
    amendment: Annotated[bytes, Field(max_length=1 << 16)]


class Welcome(Schema):
    """Answer to Hello: the line of history, the version to be at, and the places to choose from. Of whoever has no place yet in a
    grouped run the line is EVERYBODY's.

    `member` says that the volunteer still holds its place; `commit` repeats the last commit for a voter who missed it.
    """

    kind: Literal["welcome"] = "welcome"
    line: Line
    version: Count
    member: bool
    places: tuple[Place, ...]
    commit: Commit | None = None


class Granted(Schema):
    """The place is yours: load its graphs and say Prepared. From now on you are on this line."""

    kind: Literal["granted"] = "granted"
    line: Line
    begin: Block
    end: Block


class Refused(Schema):
    """The claimed place is taken; choose again."""

    kind: Literal["refused"] = "refused"
    why: Text
    places: tuple[Place, ...] = ()


class Fetch(Schema):
    """Load the state of `version` of your blocks; `sources` names holders per block (none: the coordinator)."""

    kind: Literal["fetch"] = "fetch"
    line: Line
    version: Count
    sources: dict[Block, tuple[Peer, ...]]
    digests: dict[Block, Digest] = {}
    origin: Count = 0
    """Of which cluster the coordinator has it."""


class Begin(Schema):
    """A step starts: who holds what, and the microbatches of batch `batch` whose first hop is the receiver.

    Ids from `microbatches` on are held-out microbatches, forward only. `group` above 0: no step, the clusters of that
    group average their parameters of version `step`; the roster is that of all of them, and among each other they name it by the group.
    """

    kind: Literal["begin"] = "begin"
    line: Line
    step: Count
    batch: Count
    group: Count = 0
    delayed: bool = False
    """Of an averaging: of copies, and the next steps go on meanwhile."""
    microbatches: Count
    roster: dict[Peer, Range]
    incarnations: dict[Peer, Count]
    tasks: tuple[Task, ...]
    target: Speed = 0.0
    """Seconds that a link is to take for a microbatch; 0: not known."""
    behind: Count = 0
    """It is computed with the parameters of a version that is so many older than `step`, and its update made to version `step`
    (docs/asynchronous.md).
    """
    entry: Count = 0
    """0 at the step's beginning; the n-th who comes in while it runs has n."""
    ticket: Ticket = b""
    """For who comes in later: the coordinator's word that it takes part (admission ticket, bootstrap/tickets.py)."""


class Joined(Schema):
    """These came into the step while it ran, and did not find everybody by themselves."""

    kind: Literal["joined"] = "joined"
    line: Line
    step: Count
    entrants: Annotated[tuple[Entrant, ...], Field(max_length=1 << 12)]


class Reroute(Schema):
    """Microbatches that are handed out again within the step, starting at the receiver; in no newer attempt it is advice on what
    has not begun: another way, perhaps one that starts at somebody else (`Pipeline.assign`). Without tasks: seal what is done.
    """

    kind: Literal["reroute"] = "reroute"
    line: Line
    step: Count
    tasks: tuple[Task, ...]


class Gone(Schema):
    """These volunteers left the roster: their tasks are to be sent elsewhere, their messages ignored."""

    kind: Literal["gone"] = "gone"
    line: Line
    group: Count = 0
    peers: tuple[Peer, ...]


class Settled(Schema):
    """The coordinator's word on a sealed slot: it counts, but for the blocks `refused`."""

    kind: Literal["settled"] = "settled"
    line: Line
    step: Count
    slot: Count
    refused: tuple[Block, ...] = ()


class Evict(Schema):
    """Your accepted sums of these blocks do not count any more: drop them."""

    kind: Literal["evict"] = "evict"
    line: Line
    step: Count
    blocks: tuple[Block, ...]


class Check(Schema):
    """Spot check `check`: these are to be computed once more by `tasks[].route[0]`. Where that begins with the data it is the receiver; else the
    receiver has the bundles, and sends them there (docs/trust.md).
    """

    kind: Literal["check"] = "check"
    line: Line
    step: Count
    check: Annotated[int, Field(ge=1, lt=1 << 32)]
    tasks: tuple[Task, ...]


class Show(Schema):
    """Show the fingerprints of what `peer` has sent you under `plan`; with `peer` empty, of what you have computed once more for `check`:
    those of `marks`, which lack their values, and digests of what others have given you for it. Where `peer` is you: such digests of what you count.
    """

    kind: Literal["show"] = "show"
    line: Line
    step: Count
    check: Annotated[int, Field(ge=1, lt=1 << 32)]
    plan: Count
    peer: Annotated[str, Field(max_length=128)] = ""
    marks: Annotated[tuple[Mark, ...], Field(max_length=1 << 12)] = ()


class Plan(OfPlan):
    """Reduce exactly these covers. A higher `plan` of the same step voids all lower ones."""

    kind: Literal["plan"] = "plan"
    covers: tuple[Cover, ...]


class Commit(OfPlan):
    """Step `step` is decided: apply plan `plan`'s gradients, scaled by `coefficient` (global-norm clipping).

    If it is an averaging: `coefficient` times the sums are the parameters from version `step`+1 on, and there is no loss.
    """

    kind: Literal["commit"] = "commit"
    coefficient: float
    loss: float | None
    """Of the whole batch, nats per token."""
    digests: dict[Block, Digest]
    workers: Count = 1
    """Clusters that averaged last time: of how many gradients the next mean is."""


class RolledBack(Schema):
    """The run goes back to `version`: forget the step, keep nothing of an older line."""

    kind: Literal["rolled_back"] = "rolled_back"
    line: Line
    version: Count
    why: Text


class Save(Schema):
    """Upload the state of these blocks (of `version`) for a checkpoint."""

    kind: Literal["save"] = "save"
    line: Line
    version: Count
    blocks: tuple[Block, ...]


class Fenced(Schema):
    """You are not in the roster any more: come back with a new incarnation."""

    kind: Literal["fenced"] = "fenced"
    why: Text


class Finished(Schema):
    """The run is over; nothing more is to be done."""

    kind: Literal["finished"] = "finished"
    why: Text
    completed: bool


class Rejected(Schema):
    """You cannot take part: another wire version, another run, or turned away at the door (docs/admission.md)."""

    kind: Literal["rejected"] = "rejected"
    reason: Literal["version", "run", "banned", "uninvited", "work", "crowded"]
    why: Text


FromVolunteer = (
    Hello
    | Claim
    | Prepared
    | Ready
    | Sealed
    | Evaluated
    | Failed
    | Reducing
    | Objection
    | Vote
    | Checked
    | Compared
    | Shown
    | Applied
    | Paced
    | Farewell
    | Heartbeat
    | EventLine
)
FromCoordinator = (
    Kept
    | Amended
    | Welcome
    | Granted
    | Refused
    | Fetch
    | Begin
    | Joined
    | Reroute
    | Gone
    | Settled
    | Evict
    | Check
    | Show
    | Plan
    | Commit
    | RolledBack
    | Save
    | Fenced
    | Finished
    | Rejected
    | Heartbeat
)
Message = FromVolunteer | FromCoordinator

Welcome.model_rebuild()

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: BaseModel) -> bytes:
    """The message as msgpack."""
    packed: bytes = msgpack.packb(message.model_dump(mode="python"))
    return packed


def decode(data: bytes | bytearray) -> Message:
    """A message from its bytes; ProtocolError says which field is wrong."""
    plain = unpack(data, "a message", strict_map_key=False, max_ext_len=0)
    try:
        return _ADAPTER.validate_python(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError("message does not fit its schema", why=f"{where}: {first['msg']}") from None
