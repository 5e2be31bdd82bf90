"""Encoding and decoding of tensors by the worker: bundles as their link needs them, and all that arrives
encoded.

A bundle waits while the arena has no room to write or to decode it (`MemoryWait`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hetpeer.averaging import effects as e
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.tensor_heads import (
    ActivationHead,
    BundleWay,
    Coded,
    GradientHead,
    Head,
    ShardHead,
)
from hetpeer.dht.base.errors import ProtocolError, short_id
from hetpeer.dht.streams.abuse import Offence, OffenceError
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.transport.tensor_schema import TensorSchema, layout_of
from hetpeer.peer.transport.tensor_store import Tensor
from hetpeer.peer.transport.worker_posts import Answer, WorkerPosts
from hetpeer.stages.ipc.arena import ArenaFullError
from hetpeer.stages.ipc.block_commands import Decode, Encode
from hetpeer.stages.ipc.worker_messages import CommandFailedError
from hetpeer.stages.links.adaptive_ratio import AdaptiveRatio
from hetpeer.stages.links.codec import Codec

WRONG_BYTES = ("HP-WIRE-001", "HP-NUM-001")
"""Codes of the worker's errors for a bundle that no honest peer writes."""

CodedBundles = dict[BundleWay, dict[int, Coded]]
"""Way → microbatch → how its bundle was coded; others went as they are."""
BundleHead = ActivationHead | GradientHead
Send = Callable[[str, BundleHead, Tensor], None]
Offended = Callable[[str, ProtocolError], None]
Unread = Callable[[str, BundleHead, str], None]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class LinkTranscoder:
    """Codecs of one place.

    `send` puts a tensor on the link to a peer; `offended` counts a malformed one; `unread` names its bundle,
    and why.
    """

    _posts: WorkerPosts
    _schema: TensorSchema
    _book: LinkBook
    _me: str
    _send: Send
    _offended: Offended
    _unread: Unread
    _sent: set[tuple[e.StepId, int, int]] = field(default_factory=set)
    """Gradients that a residual has been taken from: a repeated one is sent without."""
    _codings: dict[tuple[e.StepId, int, int, bool], AdaptiveRatio] = field(default_factory=dict)
    """(step, microbatch, block border, is gradient) → first encoding of the bundle, for spot checks."""
    _bundles: dict[StepId, CodedBundles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = self._posts.store

    def out(self, step: e.StepId, peer: str, head: BundleHead, tensor: Tensor) -> Answer | None:
        """Send a bundle; None if it leaves at once, unencoded. Raises ArenaFullError with nothing done."""
        gradient = isinstance(head, GradientHead)
        border = head.border if isinstance(head, GradientHead) else head.route[0].begin
        layout = (
            self._schema.input_layout(border, head.id, gradients=True)
            if gradient
            else self._schema.output_layout(border, head.id)
        )
        if peer == self._me:
            self._send(peer, head, tensor)
            return None
        coding = self._book.coding(peer, layout.nbytes, layout.width, gradient=gradient, batch=step.batch)
        if self._schema.trust.spot_checks:  # a checker that computes from it again must get the same
            coding = self._codings.setdefault((step, head.id, border, gradient), coding)
        evaluated = head.id >= self._schema.microbatches  # of the model as it is exported: without cuts
        if evaluated or coding.codec.values is None or not layout.width:
            size = layout.nbytes
            self._book.sent(peer, size, size, gradient=gradient, evaluated=evaluated)
            self._book.computed("encode", 0.0)
            self._send(peer, head, tensor)
            return None
        self._store.bring_back(tensor)
        held = self._store.pin([tensor])
        try:
            into = self._store.new(step, layout.room(coding.codec, coding.share))
        finally:
            self._store.unpin(held)
        into.once = True
        feedback = self._book.feedback and gradient and coding.codec.sparse and not tensor.sparse
        if feedback:
            key = (step, head.id, border)
            feedback = key not in self._sent
            self._sent.add(key)
        command = Encode(
            codec=str(coding.codec),
            share=coding.share,
            squeeze=self._book.squeezes(peer),
            feedback=f"border {border}" if feedback else "",
            tensors=layout.tensors(tensor.extent),
            into=into.extent,
        )
        posted, began = self._posts.post(command, [tensor, into]), time.monotonic()

        async def answer() -> None:
            try:
                done = await posted
            except CommandFailedError as error:
                _log.warning("a bundle is sent as it is: %s", error)
                self._store.release(into)
                if not tensor.released:
                    self._send(peer, head, tensor)
                return
            if into.released:  # the step is over
                return
            into.length = done.nbytes
            self._book.computed("encode", time.monotonic() - began)
            self._book.sent(peer, layout.nbytes, done.nbytes, gradient=gradient)
            head_of_coded = head.model_copy(
                update={"coded": Coded(codec=str(coding.codec), written=done.written)}
            )
            self._note(step.on_wire, head_of_coded, sent=True)
            self._send(peer, head_of_coded, into)

        return answer()

    def into(
        self, step: e.StepId, peer: str, head: Head, tensor: Tensor, then: Callable[[Tensor], None]
    ) -> Answer:
        """Decode what `peer` wrote into `tensor`; `then` gets it.

        A malformed tensor is dropped: a bundle comes another way, and the plan of a shard is made again.
        Raises ArenaFullError with nothing done.
        """
        assert head.coded is not None
        layout = layout_of(self._schema, head)
        codec = Codec.of(head.coded.codec)
        bundle = self._store.new(step, layout.nbytes)
        bundle.sparse = codec.sparse
        self._store.hand_on(tensor, bundle)
        command = Decode(
            codec=head.coded.codec,
            written=head.coded.written,
            data=tensor.extent,
            tensors=layout.tensors(bundle.extent),
        )
        posted, began = self._posts.post(command, [tensor, bundle]), time.monotonic()

        async def answer() -> None:
            try:
                await posted
            except CommandFailedError as error:
                _log.warning("%s sent a %s that cannot be read: %s", short_id(peer), head.kind, error)
                self._store.release(bundle)
                if error.code in WRONG_BYTES:
                    self._offended(peer, OffenceError(Offence.UNREADABLE, error.what, peer=peer))
                    if not isinstance(head, ShardHead):
                        self._unread(peer, head, error.what)
                return
            finally:
                self._store.release(tensor)
            if not isinstance(head, ShardHead):
                self._book.computed("decode", time.monotonic() - began)
            if not bundle.released:
                self._note(step, head, sent=False)
                then(bundle)

        return answer()

    def _note(self, step: e.StepId, head: Head, *, sent: bool) -> None:
        """Keep how a bundle was coded: the first that arrived for a task of ours, the last that was sent."""
        if isinstance(head, ShardHead) or head.check or head.coded is None:
            return
        border = head.border if isinstance(head, GradientHead) else head.route[0].begin
        way = BundleWay(border, isinstance(head, GradientHead), sent)
        bundles = self._bundles.setdefault(step, {}).setdefault(way, {})
        if sent or head.id not in bundles:
            bundles[head.id] = head.coded

    def coded_bundles(self, step: e.StepId) -> CodedBundles:
        """How the bundles of `step` were coded that came here, or left here."""
        return self._bundles.get(step.on_wire, {})

    def end_step(self, step: e.StepId) -> None:
        """Forget `step`: nothing of it is sent any more."""
        self._bundles.pop(step, None)
        self._sent = {key for key in self._sent if key[0] != step}
        self._codings = {key: coding for key, coding in self._codings.items() if key[0] != step}


LATE_S = 0.05
"""Seconds between two tries."""

Try = Callable[[], Answer | None]
"""Sends or decodes a bundle, or raises ArenaFullError with nothing done. Returns what is left to wait for."""


class MemoryWait:
    """Tries again what found no room. `start` runs what a try returns, `spawn` runs a task."""

    def __init__(self, start: Callable[[Answer], None], spawn: Callable[[Answer], object]) -> None:
        self._start = start
        self._spawn = spawn
        self._unsent: deque[tuple[StepId, Try]] = deque()
        self._undecoded: list[tuple[StepId, Try]] = []

    def send(self, step: StepId, out: Try) -> None:
        """Call `out`, which sends a bundle, behind those that wait already."""
        if self._unsent or not self._goes(out):
            self._unsent.append((step, out))
            if len(self._unsent) == 1:
                self._spawn(self._send_late())

    async def _send_late(self) -> None:
        while self._unsent:
            await asyncio.sleep(LATE_S)
            while self._unsent and self._goes(self._unsent[0][1]):
                self._unsent.popleft()

    def decode(self, step: StepId, into: Try) -> None:
        """Call `into`, which decodes a tensor.

        No tensor waits for another: one farther from the loss could wait for one nearer to it.
        """
        if not self._goes(into):
            self._undecoded.append((step, into))
            if len(self._undecoded) == 1:
                self._spawn(self._decode_late())

    async def _decode_late(self) -> None:
        while self._undecoded:
            await asyncio.sleep(LATE_S)
            self._undecoded = [late for late in self._undecoded if not self._goes(late[1])]

    def _goes(self, attempt: Try) -> bool:
        try:
            if (answer := attempt()) is not None:
                self._start(answer)
        except ArenaFullError:
            return False
        return True

    def end_step(self, step: StepId) -> None:
        """Drop the waiting tensors of `step`, by our name for it or by others'."""
        self._unsent = deque(late for late in self._unsent if late[0] != step)
        self._undecoded = [late for late in self._undecoded if late[0] != step]
