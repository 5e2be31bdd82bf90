"""Commands for bundles on their way out and in: what the worker does beside computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.command import Command, WorkerLane
from hetpeer.stages.ipc.results import BundleMarked, Done, Encoded, Name, Number
from hetpeer.stages.links.codec import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode(Command[Encoded]):
    """Write a bundle's tensors (dtype and extent of each) into `into` by `codec` (bundle_codec.py).

    The tensors stay as they are. `into` has at least `links.codecs.room` bytes for all of them.
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
    """Fill a bundle's tensors from `data`, which a peer wrote by `codec`. Of no use after a failure, which is the peer's."""

    lane: ClassVar[WorkerLane] = WorkerLane.RECEIVE
    kind: Literal["decode"] = "decode"
    codec: Name
    written: tuple[Written, ...]
    data: Extent
    tensors: tuple[tuple[Name, Extent], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkBundle(Command[BundleMarked]):
    """Fingerprint a bundle's tensors, dtype and extent of each, under `key` (fingerprint.py)."""

    answer: ClassVar[type[Any]] = BundleMarked
    lane: ClassVar[WorkerLane] = WorkerLane.RECEIVE
    kind: Literal["mark_bundle"] = "mark_bundle"
    tensors: tuple[tuple[Name, Extent], ...]
    key: Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetResiduals(Command[Done]):
    """Drop what error feedback has kept: the place changes."""

    lane: ClassVar[WorkerLane] = WorkerLane.SEND
    kind: Literal["forget_residuals"] = "forget_residuals"
