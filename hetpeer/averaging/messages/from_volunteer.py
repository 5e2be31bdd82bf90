"""Messages of a volunteer to the coordinator (docs/protocol.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hetpeer.averaging.messages.message_fields import (
    MOST_MARKS,
    MOST_NAMED,
    MOST_RECEIPTS,
    OLDEST_VERSION,
    WIRE_VERSION,
    Amount,
    Block,
    BlockVote,
    Contents,
    CoordinateNumbers,
    Count,
    Event,
    Heartbeat,
    Held,
    Hits,
    Id,
    Length,
    Loss,
    Many,
    Mark,
    OfPlan,
    OfStep,
    Peer,
    Peers,
    Range,
    Receipt,
    Received,
    Schema,
    Speed,
    Table,
    TermView,
    Text,
)
from hetpeer.stages.pipeline.place_memory import Offered, kinds_of

MOST_VOTED, MOST_SHOWN, MOST_GIVEN = 1 << 12, 1 << 12, 1 << 13
"""Entries at most: in each list of a Vote but its blocks; fingerprints and inputs in a Shown."""


class Hello(Schema):
    """First message of every control stream. `held` is what the volunteer has in memory, if it comes back."""

    kind: Literal["hello"] = "hello"
    wire_version: Count = WIRE_VERSION
    oldest_version: Count = 0
    """The oldest wire version that the volunteer speaks; 0: only `wire_version`."""
    run: Text
    incarnation: Count
    name: Text = ""
    memory_bytes: Count = 0
    """Memory of the device that it offers: of its GPU, or main memory if the processor computes."""
    host_bytes: Count = 0
    """Main memory that it offers beside a GPU."""
    disk_bytes: Count = 0
    offload: Text = ""
    """Kinds of offload that its owner allows, a key of CHOICES; empty: the version knows none."""
    flops_per_second: Speed = 0.0
    """FLOP/s reached on the blocks of the volunteer's place; `product_flops` before it has had one."""
    product_flops: Speed = 0.0
    """FLOP/s in a product of large matrices, measured everywhere in the same way; 0: unknown."""
    uplink: Speed = 0.0
    """Bytes/s that the volunteer can send, within its limits, as measured before; 0: not known."""
    downlink: Speed = 0.0
    """The same of what it can receive."""
    coordinate: CoordinateNumbers = ()
    place: Range | None = None
    cluster: Count = 0
    """The cluster of the term-view that it was in."""
    held: Many[Held] = ()
    voucher: Annotated[bytes, Field(max_length=512)] = b""
    """The voucher of its invite, if the run asks for one (bootstrap/run/vouchers.py)."""
    work: Annotated[bytes, Field(max_length=8)] = b""
    """The volunteer's proof of work, if the run asks for one (bootstrap/admission/proof_of_work.py)."""

    @property
    def offered(self) -> Offered | None:
        """Its offer to a place; None: it does not say."""
        if not self.memory_bytes:
            return None
        return Offered(
            device=self.memory_bytes,
            host=self.host_bytes,
            disk=self.disk_bytes,
            kinds=kinds_of(self.offload),
        )

    @property
    def understands_us(self) -> bool:
        """Whether there is a version that both sides speak."""
        return (
            self.wire_version >= OLDEST_VERSION and (self.oldest_version or self.wire_version) <= WIRE_VERSION
        )


class Claim(Schema):
    """The volunteer has chosen this open place."""

    kind: Literal["claim"] = "claim"
    cluster: Count
    begin: Block
    end: Block


class Prepared(Schema):
    """Graphs are loaded, and the worker runs: the state may be fetched at the next step barrier.

    `flops_per_second` is what the device reaches on these blocks; in Hello it was a guess.
    """

    kind: Literal["prepared"] = "prepared"
    flops_per_second: Speed = 0.0


class Ready(Schema):
    """The state of `version` is loaded; `held` proves it."""

    kind: Literal["ready"] = "ready"
    line: TermView
    version: Count
    held: Many[Held]


class Sealed(OfStep):
    """A sealed slot; `losses` are those of the ids that ended here (last block only)."""

    kind: Literal["sealed"] = "sealed"
    slot: Count
    contents: Many[Contents]
    losses: Table[Id, Loss] = Field(default_factory=dict)


class Evaluated(OfStep):
    """Losses of evaluation microbatches that ended here.

    `hits`: of their targets those that are predicted right, and those that count; nothing if there are none.
    """

    kind: Literal["evaluated"] = "evaluated"
    losses: Table[Id, Loss]
    hits: Table[Id, Hits] = Field(default_factory=dict)


class Failed(OfStep):
    """A microbatch could not be computed here. `given`: peer whose malformed tensor was the reason, or ""."""

    kind: Literal["failed"] = "failed"
    id: Id
    why: Text
    given: Annotated[str, Field(max_length=128)] = ""


class Vote(OfPlan):
    """The reduced gradients of plan `plan` have arrived and look like this."""

    kind: Literal["vote"] = "vote"
    blocks: Many[BlockVote]
    received: Annotated[tuple[Received, ...], Field(max_length=MOST_VOTED)] = ()
    """Digests of the results of each reducer, for blocks that the plan names as `closely`."""
    lengths: Annotated[tuple[Length, ...], Field(max_length=MOST_VOTED)] = ()
    """Squared lengths of all parts that we have added up, if there are spot checks."""


class Proved(OfPlan):
    """Fingerprints of what we sent under `plan` and of the sums that came, at each mark of our blocks."""

    kind: Literal["proved"] = "proved"
    parts: Annotated[tuple[Mark, ...], Field(max_length=MOST_MARKS)]
    sums: Annotated[tuple[Mark, ...], Field(max_length=MOST_MARKS)]
    key: Annotated[bytes, Field(max_length=16)] = b""
    """Under which we have fingerprinted what others sent."""


class Testimony(OfPlan):
    """Fingerprints of what we have received under `plan`."""

    kind: Literal["testimony"] = "testimony"
    received: Annotated[tuple[Receipt, ...], Field(max_length=MOST_RECEIPTS)]


class Missed(OfPlan):
    """Plan `plan` was given up: reducers whose `sums`, and holders whose `parts`, had not come to us."""

    kind: Literal["missed"] = "missed"
    sums: Peers = ()
    parts: Peers = ()


class Reducing(OfPlan):
    """Shards of plan `plan` arrive here: it goes on, however long it takes."""

    kind: Literal["reducing"] = "reducing"


class Objection(OfPlan):
    """The part that `peer` sent of `block` for plan `plan` cannot be added, and `why`: there is no sum."""

    kind: Literal["objection"] = "objection"
    block: Block
    peer: Peer
    why: Text


class Checked(OfStep):
    """Microbatch `id` has been computed once more here from block `begin` on, for spot check `check`.

    `output`, `gradient`, `sums`: what rounding changes, if it was measured (stages/block/rounding.py).
    """

    kind: Literal["checked"] = "checked"
    check: Count
    id: Id
    begin: Block
    output: Amount = 0.0
    gradient: Amount = 0.0
    sums: Many[Amount] = ()


class Compared(OfStep):
    """Comparison for spot check `check`: the bundle that enters block `border`, or with `back` its gradient.

    The checker `peer` sent it. `alike`: peers whose own tensor for that place was the same; `differ`: peers
    whose tensor was not, and `apart` the 2-norm of each difference (version 4: none).
    """

    kind: Literal["compared"] = "compared"
    check: Count
    id: Id
    border: Block
    back: bool
    peer: Peer
    alike: Peers = ()
    differ: Peers = ()
    apart: Annotated[tuple[Amount, ...], Field(max_length=MOST_NAMED)] = ()


class Given(Schema):
    """Input of `id` from block `begin` on: digest of `peer`'s bundle, or with `back` of its gradient."""

    id: Id
    begin: Block
    back: bool
    peer: Annotated[str, Field(max_length=128)]
    digest: Annotated[bytes, Field(max_length=32)]


class Shown(OfStep):
    """Fingerprints for spot check `check`: of parts received under `plan`, or of what was computed once more.

    `given` has the inputs of that, or of what we count.
    """

    kind: Literal["shown"] = "shown"
    check: Count
    plan: Count
    marks: Annotated[tuple[Mark, ...], Field(max_length=MOST_SHOWN)]
    given: Annotated[tuple[Given, ...], Field(max_length=MOST_GIVEN)] = ()


class Applied(OfStep):
    """The update of `step` is applied; `event` is the signed line of the volunteer's own log."""

    kind: Literal["applied"] = "applied"
    held: Many[Held]


class Paced(Schema):
    """Speeds of the volunteer, once a step: the next step's link targets follow from them
    (stages/links/adaptive_ratio.py).

    `computing`: seconds of a microbatch at this place; less if the volunteer was given none for some steps
    (peer/transport/link_book.py). `links`: peer → seconds to send the largest bundle uncompressed, at the
    rate at which bytes last arrived there. `uplink`: bytes/s of all links together; 0: unknown. `coordinate`:
    where it is by now.
    """

    kind: Literal["paced"] = "paced"
    computing: Speed
    links: Table[Peer, Speed]
    uplink: Speed = 0.0
    coordinate: CoordinateNumbers = ()


class Shuns(Schema):
    """All peers that we exchange no tensors with for now, because they have offended; said when that changes
    and in each step.

    Tensors of these peers do not arrive here, and no other volunteer would know.
    """

    kind: Literal["shuns"] = "shuns"
    peers: Peers = ()


class Farewell(Schema):
    """The volunteer leaves.

    With `within_s` it stays for at most that many seconds, until `Released`: the state that it alone holds is
    stored meanwhile. Without, it does not answer any more.
    """

    kind: Literal["farewell"] = "farewell"
    within_s: Speed = 0.0


class EventLine(Schema):
    """A signed line of the volunteer's event log, kept by the coordinator for the audit."""

    kind: Literal["event"] = "event"
    line: Event


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
    | Missed
    | Vote
    | Proved
    | Testimony
    | Checked
    | Compared
    | Shown
    | Applied
    | Paced
    | Shuns
    | Farewell
    | Heartbeat
    | EventLine
)
