"""The heads of tensors on their way from volunteer to volunteer.

A head says what the payload is; its size follows from the run's graph and is checked before a byte is taken. Tensors
of a bundle lie one after the other in the order of the block's spec (stages/ipc/bundle_layout.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.messages import Block, Count, Id, Schema, TermView, Ticket
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import first_wrong
from hetpeer.stages.links.codec import Written
from hetpeer.stages.pipeline.routes import Hop


class _Head(Schema):
    line: TermView
    step: Count
    incarnation: Count

    @property
    def step_id(self) -> StepId:
        return StepId(self.line, self.step)


class Coded(Schema):
    """How a bundle or a shard is written, where that is not as it lies in memory; one entry for each tensor."""

    codec: Annotated[str, Field(max_length=32)]
    written: Annotated[tuple[Written, ...], Field(max_length=1 << 10)]


class ActivationHead(_Head):
    """The bundle that enters block `route[0].begin` of microbatch `id`. A `nudge` is the head alone: the bundle was sent
    before, and now waits for credit.
    """

    kind: Literal["activation"] = "activation"
    id: Id
    batch: Count
    """Which the step trains: what the receiver reads of the author's data it may fetch before it hears of the step."""
    route: Annotated[tuple[Hop, ...], Field(min_length=1, max_length=256)]
    attempt: Count
    coded: Coded | None = None
    nudge: bool = False
    check: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    """Above 0: to be computed once more, for that spot check."""
    asks: bool = False
    """The receiver has computed this already, for another: it is to compare the two for `check`, and to give the gradient that it keeps."""


class GradientHead(_Head):
    """The gradient of the bundle that entered block `border` of microbatch `id`."""

    kind: Literal["gradient"] = "gradient"
    id: Id
    border: Block
    coded: Coded | None = None
    check: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    """Above 0: the receiver has had it already, from another, and is to compare the two for that spot check."""


class ShardHead(_Head):
    """Elements [begin, end) of the flat vector of `block` under `plan`: one holder's `part`, or the `result`."""

    kind: Literal["part", "result"]
    plan: Count
    block: Block
    index: Count
    begin: Count
    end: Count
    coded: Coded | None = None


class Introduction(_Head):
    """A head alone: we hold the blocks [begin, end) in this step, and you may not have heard of it. Who keeps a leftover for
    these blocks sends it. `ticket` proves it to those who do not know us (bootstrap/admission/step_tickets.py).
    """

    kind: Literal["introduction"] = "introduction"
    begin: Block
    end: Block
    ticket: Ticket = b""


Head = ActivationHead | GradientHead | ShardHead
"""Of tensors."""

_ADAPTER: TypeAdapter[Head | Introduction] = TypeAdapter(
    Annotated[Head | Introduction, Field(discriminator="kind")]
)


def encode_head(head: Head | Introduction) -> dict[str, Any]:
    """The head as plain data for a frame."""
    return head.model_dump(mode="python")


def decode_head(data: object, peer: str) -> Head | Introduction:
    """A head from plain data; ProtocolError names the field that is wrong."""
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        where, what = first_wrong(error)
        raise ProtocolError("a tensor's head does not fit", peer=peer, why=f"{where}: {what}") from None
