"""The heads of tensors on their way from volunteer to volunteer.

A head says what the payload is; its size follows from the run's graph and is checked before a byte is taken.
Tensors of a bundle lie one after the other in the order of the block's spec (stages/ipc/arena.py).
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.messages import Block, Count, Id, Schema, TermView, Ticket
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import first_wrong
from hetpeer.stages.links.codec import EncodedTensor
from hetpeer.stages.pipeline.routes import Hop


class _Head(Schema):
    line: TermView
    step: Count
    incarnation: Count

    @cached_property
    def step_id(self) -> StepId:
        return StepId(self.line, self.step)


class Coded(Schema):
    """The encoding of a bundle or a shard; one entry of `written` for each tensor."""

    codec: Annotated[str, Field(max_length=32)]
    written: Annotated[tuple[EncodedTensor, ...], Field(max_length=1 << 10)]


class BundleWay(NamedTuple):
    """Way of bundles past a holder: over which block border, and whether it has sent or received them."""

    border: int
    gradient: bool
    sent: bool


class ActivationHead(_Head):
    """The bundle that enters block `route[0].begin` of microbatch `id`.

    A `nudge` is the head alone: the bundle was sent before, and waits for a grant.
    """

    kind: Literal["activation"] = "activation"
    id: Id
    batch: Count
    """The batch of the step, so that the receiver can fetch the author's data before it hears of the step."""
    route: Annotated[tuple[Hop, ...], Field(min_length=1, max_length=256)]
    attempt: Count
    coded: Coded | None = None
    nudge: bool = False
    check: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    """Number of the spot check for which it is computed once more; 0: it is computed for the step."""
    asks: bool = False
    """The receiver computed this before: it compares both bundles for `check` and sends its old gradient."""


class GradientHead(_Head):
    """The gradient of the bundle that entered block `border` of microbatch `id`."""

    kind: Literal["gradient"] = "gradient"
    id: Id
    border: Block
    coded: Coded | None = None
    check: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    """Number of the spot check in which it is compared with what another peer sent before; 0: none."""


class ShardHead(_Head):
    """Elements [begin, end) of `block`'s flat vector under `plan`: a holder's `part`, or the `result`."""

    kind: Literal["part", "result"]
    plan: Count
    block: Block
    index: Count
    begin: Count
    end: Count
    coded: Coded | None = None


class Introduction(_Head):
    """A head alone: the sender holds the blocks [begin, end) in this step, and the receiver may not know it.

    The receiver sends the leftovers that it keeps for these blocks. `ticket` proves it to a peer that does
    not know the sender (bootstrap/admission/step_tickets.py).
    """

    kind: Literal["introduction"] = "introduction"
    begin: Block
    end: Block
    ticket: Ticket = b""


Head = ActivationHead | GradientHead | ShardHead
"""Heads of tensors."""

_ADAPTER: TypeAdapter[Head | Introduction] = TypeAdapter(
    Annotated[Head | Introduction, Field(discriminator="kind")]
)


def decode_head(data: object, peer: str) -> Head | Introduction:
    """A head from plain data; ProtocolError names the field that is wrong."""
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        where, what = first_wrong(error)
        raise ProtocolError("a tensor's head does not fit", peer=peer, why=f"{where}: {what}") from None
