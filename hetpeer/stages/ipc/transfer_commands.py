"""Commands for bundles sent and received: the lanes beside computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.command import Command, WorkerLane
from hetpeer.stages.ipc.results import BundleMarked, Done, Encoded, Name, Number
from hetpeer.stages.links.codec import EncodedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode(Command[Encoded]):
    """Encode a bundle's tensors (dtype and extent of each) into `into` with `codec` (bundle_codec.py).

    The tensors do not change. `into` has at least `BundleLayout.room` bytes.
    """

    answer: ClassVar[type[Any]] = Encoded
    lane: ClassVar[WorkerLane] = WorkerLane.SEND
    kind: Literal["encode"] = "encode"
    codec: Name
    share: Number = 1.0
    squeeze: bool = True
    feedback: Name = ""
    tensors: tuple[tuple[Name, Extent], ...]
    into: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(Command[Done]):
    """Fill a bundle's tensors from `data`, which a peer encoded with `codec`. A failure is the
    peer's fault.
    """

    lane: ClassVar[WorkerLane] = WorkerLane.RECEIVE
    kind: Literal["decode"] = "decode"
    codec: Name
    written: tuple[EncodedTensor, ...]
    data: Extent
    tensors: tuple[tuple[Name, Extent], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkBundle(Command[BundleMarked]):
    """Fingerprint a bundle's tensors (dtype and extent of each) under `key` (fingerprint.py)."""

    answer: ClassVar[type[Any]] = BundleMarked
    lane: ClassVar[WorkerLane] = WorkerLane.RECEIVE
    kind: Literal["mark_bundle"] = "mark_bundle"
    tensors: tuple[tuple[Name, Extent], ...]
    key: Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetResiduals(Command[Done]):
    """Drop the residuals of error feedback, since the place changes."""

    lane: ClassVar[WorkerLane] = WorkerLane.SEND
    kind: Literal["forget_residuals"] = "forget_residuals"
