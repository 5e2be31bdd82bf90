"""Fields of messages: bounded numbers and texts, and parts that several messages share.

A peer's claim about sizes is never believed.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from hetpeer.stages.pipeline.place_memory import PlaceDemand, Upkeep
from hetpeer.stages.pipeline.routes import Hop

CONTROL_PROTOCOL: Final = "hetpeer/1/control"
"""Protocol of the channel on which a volunteer and the coordinator exchange messages."""
WIRE_VERSION: Final = 5
OLDEST_VERSION: Final = WIRE_VERSION - 1
"""The oldest wire version that this version speaks."""
SAYS_ORDER: Final = 5
"""The first wire version in which a report of a slot has its ids in the order in which they were added."""
MEANS_BESIDE: Final = 5
"""The first wire version whose volunteers install a mean while steps overlap."""
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_KIND: Final = 64
MOST_MARKS: Final = 128
"""Fingerprints of one kind in a message."""
MOST_RECEIPTS: Final = 384
MOST_NAMED: Final = 1 << 8
"""Peers that a message names in one list."""
MAX_EVENT: Final = 1 << 19
"""Characters of a line of a volunteer's event log."""
MOST: Final = 1 << 16
"""Entries in a list or a table at most."""
UNFELT, FASTEST = 1e-9, 1e18


def _believed(value: float) -> float:
    """Clip a peer's claim so that arithmetic with it cannot overflow."""
    return min(value, FASTEST) if value >= UNFELT else 0.0


def _of_few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MOST:
        raise ValueError(f"{len(given)} entries, and {MOST} are the most")
    return given


Item = TypeVar("Item")
Key = TypeVar("Key")
Many = Annotated[tuple[Item, ...], FailFast(), Field(max_length=MOST)]
"""At most MOST entries. Validation ends at the first bad entry: a million errors would take a gigabyte."""
Table = Annotated[dict[Key, Item], BeforeValidator(_of_few)]
Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Block = Annotated[int, Field(ge=0, lt=1 << 16)]
Id = Annotated[int, Field(ge=0, lt=1 << 32)]
Peer = Annotated[str, Field(min_length=1, max_length=128)]
Digest = Annotated[str, Field(max_length=64)]
MAX_TEXT: Final = 500
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Ids = Many[Id]
CoordinateNumbers = Annotated[
    tuple[Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)], ...], Field(max_length=8)
]
"""A network coordinate, as in adverts; empty: not known."""
Peers = Annotated[tuple[Peer, ...], Field(max_length=MOST_NAMED)]
Range = tuple[Block, Block]
Event = Annotated[str, Field(max_length=MAX_EVENT, pattern=r"^[^\n]*$")]
"""A signed line (bootstrap/log/volunteer_log.py), one and not several: it is kept among others."""
Ticket = Annotated[bytes, Field(max_length=2048)]
Share = Annotated[int, Field(ge=1, lt=1 << 32)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Speed = Annotated[Amount, AfterValidator(_believed)]
"""Something per second, or seconds; 0 for less than is possible."""
Loss = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Loss of a microbatch, nats per token. Always finite: a worker refuses any other."""
Hits = tuple[Count, Count]
"""Targets that are predicted right, and targets that count."""


class Schema(BaseModel):
    """Frozen, and open to fields of later versions."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Unknown(Schema):
    """A message of a later version, whose fields we do not know: nothing follows from it."""

    kind: Annotated[str, Field(max_length=MAX_KIND)]


EVERYBODY: Final = 1 << 32
"""Stands for the cluster in the term-view of groups that average."""


class TermView(Schema):
    """The term and view that a message belongs to; a message of another term-view changes nothing (fencing).

    In a grouped run every cluster has a history of its own (docs/grouped.md); else there is one, of cluster
    0. Messages have it as the field `line`.
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
    """Contents of a slot at the blocks [begin, end): ids whose gradients it is the sum of, in the order in
    which they were added (from wire version 5 on).
    """

    begin: Block
    end: Block
    ids: Ids


class Held(Schema):
    """A block's state in a volunteer's memory: its version and the digest of its bits."""

    block: Block
    version: Count
    digest: Digest


class BlockVote(Schema):
    """A holder's word on a reduced gradient: the digest of its bits and its squared 2-norm in float64.

    `group_squares`: the squared norm of each parameter group of the manifest, and of all other parameters.
    """

    block: Block
    digest: Digest
    squared_norm: Annotated[float, Field(ge=0)]
    finite: bool
    group_squares: Many[Amount] = ()


class Received(Schema):
    """Statement of a holder of `block`: the share of the sum of block `of` that it got from `reducer`.

    `of` is `block` or tied to it. `digest`: digest of the digests of the share's shards. `finite`: whether
    all their elements are finite. Where everybody adds up movements, it is about a part and its sender.
    """

    block: Block
    of: Block
    reducer: Peer
    digest: Digest
    finite: bool


class Length(Schema):
    """Squared length of the part that a reducer got from `peer` at `block`, estimated by fingerprint."""

    block: Block
    peer: Peer
    squared: Amount


class Cover(Schema):
    """The exact cover of one block, and the peers that reduce it.

    `slots` are (holder, ids) in the order in which their sums are added. `reducers` are (peer, share): they
    add up consecutive pieces of the block's flat gradient, with lengths in proportion to their shares.
    `receivers` get every shard's sum, `observers` those shards that have elements of a parameter tied to one
    of theirs. Where movements are averaged, every receiver is a reducer and adds up all of them itself.
    """

    block: Block
    slots: Annotated[Many[tuple[Peer, Ids]], Field(min_length=1)]
    reducers: Annotated[Many[tuple[Peer, Share]], Field(min_length=1)]
    receivers: Annotated[Many[Peer], Field(min_length=1)]
    observers: Many[Peer] = ()
    length: Count = 0
    """Elements of a shard, at least; 0: as many as usual."""
    runs: Many[Annotated[Many[Count], Field(min_length=1)]] = ()
    """Lengths of the runs that the ids of each of `slots` come in. The ids of a run were added to each
    other in that order; then the runs' sums were. Empty: the ids are in no particular order.
    """


class Place(Schema):
    """A place of the plan: the blocks [begin, end) of cluster `cluster` and what they ask of a machine."""

    cluster: Count
    begin: Block
    end: Block
    memory_bytes: Count
    """Bytes that its blocks take with everything in one memory."""
    numbers: Count = 0
    """Elements of its vectors. This and the next ten fields say what the blocks take with each kind of
    offload; a coordinator that does not know them leaves them out.
    """
    kept: Count = 0
    behind: Annotated[int, Field(ge=0, lt=1 << 10)] = 0
    means: Annotated[int, Field(ge=0, lt=1 << 10)] = 0
    in_state: Annotated[int, Field(ge=0, lt=1 << 10)] = 0
    halved: Count = 0
    looked_up: Count = 0
    constant_bytes: Count = 0
    activation_bytes: Count = 0
    recomputable_bytes: Count = 0
    """Part of the activations that can be computed again; 0 also if the coordinator does not know."""
    copy_bytes: Count = 0
    flops: float
    holders: Count
    """Volunteers that hold or prepare the block of the place that has the fewest holders."""
    departures: Count = 0
    """Total number of times those volunteers left before; the maximum over such blocks."""
    rank: Count = 0
    """0: the run is served best if the receiver takes this place, or nothing is known; 1: another place
    serves it better (bootstrap/state/placement_policy.py).
    """
    open: bool

    @property
    def demand(self) -> PlaceDemand:
        """Demand of its blocks. If the coordinator names one sum only: that sum, always on the device."""
        if not self.numbers:
            return PlaceDemand(activations=self.memory_bytes)
        return PlaceDemand(
            numbers=self.numbers,
            constants=self.constant_bytes,
            activations=self.activation_bytes,
            recomputable=min(self.recomputable_bytes, self.activation_bytes),
            copies=min(self.copy_bytes, self.activation_bytes),
            halved=min(self.halved, self.numbers),
            looked_up=min(self.looked_up, self.numbers),
            upkeep=Upkeep(kept=self.kept, behind=self.behind, means=self.means, in_state=self.in_state),
        )


def demand_fields(demand: PlaceDemand) -> dict[str, int]:
    """The fields of a `Place` that say what its blocks take."""
    return {
        "memory_bytes": demand.in_one_memory,
        "numbers": demand.numbers,
        "kept": demand.upkeep.kept,
        "behind": demand.upkeep.behind,
        "means": demand.upkeep.means,
        "in_state": demand.upkeep.in_state,
        "halved": demand.halved,
        "looked_up": demand.looked_up,
        "constant_bytes": demand.constants,
        "activation_bytes": demand.activations,
        "recomputable_bytes": demand.recomputable,
        "copy_bytes": demand.copies,
    }


class OfStep(Schema):
    """A message on step `step`."""

    line: TermView
    step: Count


class OfPlan(OfStep):
    """Plan `plan` of step `step`'s reduce; if `group` > 0, of that averaging, and `step` is a version."""

    group: Count = 0
    plan: Count


Where = tuple[int, int, int, bytes]
"""Subject of a fingerprint: block, elements [begin, end), key."""


class Mark(Schema):
    """Fingerprint under `key` of elements [begin, end) of `block`'s sum (stages/block/fingerprint.py)."""

    block: Block
    begin: Count
    end: Count
    key: Annotated[bytes, Field(max_length=16)]
    values: Annotated[bytes, Field(max_length=1 << 11)] = b""

    @property
    def where(self) -> Where:
        """Subject of the fingerprint."""
        return self.block, self.begin, self.end, self.key


class Receipt(Schema):
    """The fingerprint of what `peer` has sent, as its reducer has received it."""

    peer: Peer
    mark: Mark


class Heartbeat(Schema):
    """Sent both ways every second: a frozen or cut-off peer sends no reset."""

    kind: Literal["heartbeat"] = "heartbeat"
