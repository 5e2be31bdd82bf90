"""Tensors from volunteer to volunteer: one link for each direction of each pair.

A head is checked against our graph before a byte of the payload is taken: its block must be ours, its length what the
schema says, and paid for with credit. Outgoing links are opened when there is something to send and closed when the peer
has left. Who does what no honest peer does is counted, and after a few times not listened to for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.heads import (
    ActivationHead,
    GradientHead,
    Head,
    Introduction,
    ShardHead,
    decode_head,
    encode_head,
)
from hetpeer.dht.channel import Channel
from hetpeer.dht.dialling import ChannelServer
from hetpeer.dht.errors import ProtocolError, RemoteError
from hetpeer.dht.grants import Lane
from hetpeer.dht.meter import Meter
from hetpeer.dht.node import Node
from hetpeer.dht.outbox import Parcel
from hetpeer.dht.streams import Stream
from hetpeer.dht.strikes import Kind, OffenceError
from hetpeer.dht.tasks import TaskSet
from hetpeer.peer.tracing import Trace
from hetpeer.peer.transport.intake import Intake, cost_of, pool_of
from hetpeer.peer.transport.link import TENSORS, Link
from hetpeer.peer.transport.linkbook import LinkBook
from hetpeer.peer.transport.pacing import Pacing
from hetpeer.peer.transport.schema import FLOAT_BYTES, Schema
from hetpeer.peer.transport.tensors import Tensor, TensorStore
from hetpeer.peer.transport.transcoding import layout_of
from hetpeer.stages.execution.arena import ArenaFullError
from hetpeer.stages.links.codec import Codec

MAX_PAYLOAD = 1 << 30
_log = logging.getLogger(__name__)


class PlaneOwner(Protocol):
    """What is told of tensors and links."""

    def tensor_arrived(self, peer: str, head: Head, tensor: Tensor) -> None:
        """A tensor of `peer` is here."""

    def unread(self, peer: str, head: ActivationHead | GradientHead, why: str) -> None:
        """A bundle of `peer` is none by its length or its codec."""

    def nudged(self, peer: str, head: ActivationHead) -> None:
        """An activation that `peer` sends again waits for credit there."""

    def introduced(self, peer: str, head: Introduction) -> None:
        """`peer` says which blocks it holds in a step. Raises `ProtocolError` if its ticket is none."""

    def link_changed(self, peer: str, is_up: bool) -> None:
        """Our link to `peer` is down, or up again."""

    def link_pressed(self, peer: str, blocks: int | None) -> None:
        """Our link to `peer` takes no forwards with so many blocks or more left to the loss; None: it takes all."""

    def refused(self, peer: str, for_now: bool) -> None:
        """We do not work with `peer` for now, or do again."""


class DataPlane:
    """All tensor channels of one volunteer."""

    def __init__(
        self, node: Node, key: str, tasks: TaskSet, book: LinkBook, trace: Trace, owner: PlaneOwner
    ) -> None:
        self._node = node
        self._key = key
        self._tasks = tasks
        self._book = book
        self._meters: dict[str, Meter] = {}
        self._owner = owner
        self._intake = Intake()
        self._trace = trace
        self._pacing = Pacing()
        self._outgoing: dict[str, Link] = {}
        self._generation = 0
        self._members: frozenset[str] = frozenset()
        self._word: Introduction | None = None
        self._introduced: set[str] = set()
        self._server = ChannelServer(self._accept, MAX_PAYLOAD, self._meter_of)
        self._schema: Schema | None = None
        self._store: TensorStore | None = None
        self.bytes_sent = 0
        self.bytes_received = 0
        node.watch(self._refused)

    async def start(self) -> None:
        await self._node.serve(TENSORS, self._server.handle)

    def use(self, schema: Schema | None, store: TensorStore | None) -> None:
        """The place whose schema incoming tensors must fit; None: nothing is taken."""
        self._schema, self._store = schema, store
        self._intake.use(schema, 0 if store is None else store.capacity)

    def send(self, peer: str, head: Head, tensor: Tensor) -> None:
        """Queue a tensor for `peer`. Its bytes are read when its turn comes: then it stays in place until they have arrived.

        Raises ArenaFullError if it is for ourselves, on the disk, and there is no room for it.
        """
        assert self._store is not None
        assert self._schema is not None
        if peer == self._node.peer_id:
            self._store.bring_back(tensor)
            shared = self._store.share(tensor)  # what was sent is not changed any more
            if tensor.once:
                self._store.release(tensor)
            self._owner.tensor_arrived(peer, head, shared)
            return
        link = self._outgoing.get(peer) or self._open(peer)
        if self._word is not None and self._word.ticket and peer not in self._introduced:
            self.introduce(peer)
        self.bytes_sent += tensor.nbytes
        cost = cost_of(head, tensor.nbytes, self._schema, sending=True)
        done = partial(self._arrived, peer, head) if isinstance(head, ShardHead) else None
        parcel = Parcel(encode_head(head), tag=head.step_id, pool=pool_of(head), cost=cost, done=done)
        link.send(replace(parcel, depart=partial(_departing, self._store, tensor, parcel)))

    def nudge(self, peer: str, head: ActivationHead, nbytes: int) -> None:
        """`head` is sent again: its word alone, if its bundle of `nbytes` may have to wait."""
        if (link := self._outgoing.get(peer)) is not None:
            word = head.model_copy(update={"nudge": True, "coded": None})
            link.nudge(Parcel(encode_head(word), tag=head.step_id, pool=pool_of(head)), 2 * nbytes)

    def introduction(self, word: Introduction | None) -> None:
        """How we introduce ourselves in this step. With a ticket (we came in later) before the first tensor for each peer."""
        self._word = word
        self._introduced.clear()

    def introduce(self, peer: str) -> None:
        """Say it to `peer` now, and ask for what it keeps for us."""
        assert self._word is not None
        self._introduced.add(peer)
        link = self._outgoing.get(peer) or self._open(peer)
        link.tell(Parcel(encode_head(self._word), tag=self._word.step_id))

    def share_uplink(self, step: StepId, loads: Mapping[str, int]) -> None:
        """`step` is reduced, and so much goes to each peer, in any unit: links get the parts of the uplink with which all are done at once."""
        self._pacing.begin(step, loads)
        self._pace()

    def end_step(self, step: StepId) -> None:
        """Tensors of `step` need not be delivered any more; their memory is about to be reused."""
        for link in self._outgoing.values():
            link.forget(step)
        if self._pacing.end(step):
            self._pace()

    def keep_only(self, peers: Iterable[str]) -> None:
        """The volunteers of the step that begins: close the links to others, and forget how fast they were."""
        peers = self._members = frozenset(peers)
        self._book.keep_only(peers)
        self._server.keep_only(peers)
        self._intake.members(peers, {channel.peer_id for channel in self._server})
        self._node.members(peers)
        for gone in self._meters.keys() - peers:
            del self._meters[gone]
        for peer in self._outgoing.keys() - peers:
            self._outgoing.pop(peer).close()
            self._owner.link_pressed(peer, None)

    def admit(self, peer: str) -> None:
        """One more volunteer of the step in progress."""
        if peer not in self._members:
            self.keep_only(self._members | {peer})

    def dismiss(self, peers: Iterable[str]) -> None:
        """These have left the step: what is on its way there will not be needed, and its memory is free."""
        self.keep_only(self._members.difference(peers))

    def close(self) -> None:
        self.keep_only(())
        self._server.close()
        self._node.unwatch(self._refused)

    def _open(self, peer: str) -> Link:
        self._generation += 1
        link = Link(self._node, peer, f"{self._key}.{self._generation}", self._tasks, self)
        self._outgoing[peer] = link
        link.pace_to(self._pacing.rate(peer, self._book.outflow.rate))
        return link

    def _arrived(self, peer: str, head: ShardHead) -> None:
        if self._pacing.arrived(head.step_id, peer, head.end - head.begin):
            self._pace()

    def _pace(self) -> None:
        uplink = self._book.outflow.rate
        for peer, link in self._outgoing.items():
            link.pace_to(self._pacing.rate(peer, uplink))

    # ── what links say ───────────────────────────────────────────────────────────────────────────────────────────

    def link_changed(self, peer: str, is_up: bool) -> None:
        self._owner.link_changed(peer, is_up)

    def link_lost(self, link: Link) -> None:
        # The peer was restarted: its place in the roster is void too.
        if self._outgoing.get(link.peer_id) is link:
            del self._outgoing[link.peer_id]
            self._owner.link_pressed(link.peer_id, None)
        self._owner.link_changed(link.peer_id, False)

    def link_moved(self, link: Link) -> None:
        if link.rate:
            self._book.measured(link.peer_id, link.rate, link.trip_s)
        links = self._outgoing.values()
        busy, arrived = sum(one.is_busy for one in links), sum(one.arrived for one in links)
        self._book.outflow.look(time.monotonic(), busy, arrived)

    def link_pressed(self, peer: str, blocks: int | None) -> None:
        self._owner.link_pressed(peer, blocks)

    def offended(self, peer: str, error: ProtocolError) -> None:
        self._node.offended(peer, error)

    def _refused(self, peer: str, for_now: bool) -> None:
        """The node's word on a peer with too many strikes."""
        self._owner.refused(peer, for_now)

    # ── what comes ───────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, _peer: str, _key: str) -> _Incoming:
        return _Incoming(self)

    def lane(self, channel: Channel) -> Lane:
        """The books of a channel that `channel.peer_id` has opened."""

        def announce() -> None:
            for other in self._server:
                if other.peer_id == channel.peer_id and other.key == channel.key and other.is_up:
                    other.announce()
                    return

        return self._intake.grants(channel.peer_id, channel.key, announce).lane()

    async def take(self, channel: Channel, header: Mapping[str, Any], payload: Stream, length: int) -> None:
        """Check an incoming tensor's head, take its payload, hand it on."""
        peer, lane = channel.peer_id, channel.credit
        assert lane is not None
        schema, store = self._schema, self._store
        head = decode_head(header, peer)
        if isinstance(head, Introduction):
            if length:
                raise OffenceError(Kind.LENGTH, f"an introduction of {length} bytes", peer=peer)
            self._owner.introduced(peer, head)
            return
        if schema is None or store is None or not _due(head, schema):
            await payload.skip()
            return
        if not isinstance(head, ShardHead) and head.id >= schema.ids:
            raise ProtocolError(f"a {head.kind} of microbatch {head.id}, which no step has", peer=peer)
        if isinstance(head, ActivationHead) and head.nudge:
            if length:
                raise OffenceError(Kind.LENGTH, f"a nudge of {length} bytes", peer=peer)
            self._owner.nudged(peer, head)
            return
        try:
            self._must_fit(head, schema, peer, length)
        except OffenceError as error:
            if not isinstance(head, ShardHead):
                self._owner.unread(peer, head, error.what)
            raise
        pool, cost = pool_of(head), cost_of(head, length, schema, sending=False)
        lane.claim(pool, cost)
        try:
            tensor = store.new(head.step_id, length)
        except ArenaFullError as error:
            # Credit is less than the arena, but the rest of it may be in pieces. The sender keeps it and tries again.
            raise RemoteError("HP-MEM-001", error.what, peer=peer, why=error.why, fix=error.fix) from error
        pinned = store.pin([tensor])
        began = self._trace.now()
        try:
            await payload.receive_into(store.view(tensor))
        except BaseException:
            store.release(tensor)
            raise
        finally:
            store.unpin(pinned)
        self.bytes_received += length
        self._trace.span(f"from {peer[-6:]}, lane {channel.lane}", _label(head), began, bytes=length)
        tensor.sender = peer
        store.lend(tensor, lane.settle(pool, cost))
        self._owner.tensor_arrived(peer, head, tensor)

    def _meter_of(self, peer: str) -> Meter:
        return self._meters.setdefault(peer, Meter())

    def _must_fit(self, head: Head, schema: Schema, peer: str, length: int) -> None:
        """Raises `OffenceError` for a payload of another length than `head` must have."""
        due = self._due_bytes(head, schema, peer)
        if length != due:
            raise OffenceError(Kind.LENGTH, f"a {head.kind} of {length} bytes, not {due}", peer=peer)

    def _due_bytes(self, head: Head, schema: Schema, peer: str) -> int:
        """The length of its payload, from our own graph and what the run's codec allows."""
        if head.coded is None:
            return _nbytes(head, schema)
        try:
            codec = Codec.of(head.coded.codec)
        except ValueError as error:
            raise OffenceError(Kind.CODEC, "a tensor in an unknown codec", peer=peer) from error
        if not self._book.allows(codec, head.kind):
            raise OffenceError(Kind.CODEC, f"a tensor in {codec}, which is not of this run", peer=peer)
        return layout_of(schema, head).written(codec, head.coded.written)


def _departing(store: TensorStore, tensor: Tensor, parcel: Parcel) -> Parcel | None:
    """`parcel` with its payload; None while there is no room to bring it back from the disk."""
    try:
        store.bring_back(tensor)
    except ArenaFullError:
        return None
    free = store.leaves(tensor)

    def done() -> None:
        free()
        if parcel.done is not None:
            parcel.done()

    return replace(parcel, payload=(store.view(tensor),), done=done)


def _due(head: Head, schema: Schema) -> bool:
    """Whether the tensor is about blocks that we hold, or tied to one of them."""
    match head:
        case ActivationHead():
            return schema.holds(head.route[0].begin) and head.route[0].begin > 0
        case GradientHead():
            return schema.holds(head.border - 1)
        case ShardHead():
            concerns = schema.holds if head.kind == "part" else schema.observes
            return concerns(head.block) and head.begin <= head.end <= schema.elements(head.block)


def _nbytes(head: Head, schema: Schema) -> int:
    """The length of its payload, from our own graph."""
    match head:
        case ActivationHead():
            return schema.input_layout(head.route[0].begin, head.id).nbytes
        case GradientHead():
            return schema.output_layout(head.border, head.id, gradients=True).nbytes
        case ShardHead():
            return (head.end - head.begin) * FLOAT_BYTES


def _label(head: Head) -> str:
    return f"{head.kind} {head.block if isinstance(head, ShardHead) else head.id}"


class _Incoming:
    """The receiver of one peer's tensors."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def frame(self, channel: Channel, header: Mapping[str, Any], payload: Stream, length: int) -> None:
        await self._plane.take(channel, header, payload, length)

    def beat(self, _channel: Channel) -> None:
        """Acknowledgements need no answer of ours."""

    def up(self, channel: Channel) -> None:
        """The sender watches the link; ours is what it may send."""
        if channel.credit is None:
            channel.credit = self._plane.lane(channel)

    def down(self, _channel: Channel) -> None:
        """The sender watches the link."""
