"""Tensors from volunteer to volunteer: one link for each direction of each pair.

A head is checked against our graph before a byte of the payload is taken: its block must be ours and its length what
the schema says. Outgoing links are opened when there is something to send and closed when the peer has left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.heads import ActivationHead, GradientHead, Head, ShardHead, decode_head, encode_head
from hetpeer.dht.channel import Channel, ChannelServer, Parcel
from hetpeer.dht.errors import ProtocolError, RemoteError
from hetpeer.dht.meter import Meter
from hetpeer.dht.node import Node
from hetpeer.dht.streams import Stream
from hetpeer.dht.tasks import TaskSet
from hetpeer.peer.link import TENSORS, Link
from hetpeer.peer.linkbook import LinkBook
from hetpeer.peer.reducing import FLOAT_BYTES
from hetpeer.peer.schema import Schema
from hetpeer.peer.tensors import Tensor, TensorStore
from hetpeer.peer.tracing import Trace
from hetpeer.peer.transcoding import bundle_layout
from hetpeer.stages.execution.arena import ArenaFullError
from hetpeer.stages.links.codec import Codec

MAX_PAYLOAD = 1 << 30
_log = logging.getLogger(__name__)

Arrived = Callable[[str, Head, Tensor], None]
LinkChanged = Callable[[str, bool], None]


class DataPlane:
    """All tensor channels of one volunteer. `arrived` gets each tensor with its head and sender."""

    def __init__(
        self,
        node: Node,
        key: str,
        tasks: TaskSet,
        book: LinkBook,
        arrived: Arrived,
        link_changed: LinkChanged,
        trace: Trace,
    ) -> None:
        self._node = node
        self._key = key
        self._tasks = tasks
        self._book = book
        self._meters: dict[str, Meter] = {}
        self._arrived = arrived
        self._link_changed = link_changed
        self._trace = trace
        self._outgoing: dict[str, Link] = {}
        self._generation = 0
        self._server = ChannelServer(lambda peer, _key: _Incoming(self, peer), MAX_PAYLOAD, self._meter_of)
        self._schema: Schema | None = None
        self._store: TensorStore | None = None
        self.bytes_sent = 0
        self.bytes_received = 0

    async def start(self) -> None:
        await self._node.serve(TENSORS, self._server.handle)

    def use(self, schema: Schema | None, store: TensorStore | None) -> None:
        """The place whose schema incoming tensors must fit; None: nothing is taken."""
        self._schema, self._store = schema, store

    def send(self, peer: str, head: Head, tensor: Tensor) -> None:
        """Queue a tensor for `peer`. Its bytes are read when its turn comes: it must live until its step ends."""
        assert self._store is not None
        if peer == self._node.peer_id:
            self._arrived(peer, head, self._store.share(tensor))  # what was sent is not changed any more
            return
        link = self._outgoing.get(peer) or self._open(peer)
        view = self._store.view(tensor)
        self.bytes_sent += len(view)
        link.send(Parcel(encode_head(head), (view,), tag=head.step_id))

    def end_step(self, step: StepId) -> None:
        """Tensors of `step` need not be delivered any more; their memory is about to be reused."""
        for link in self._outgoing.values():
            link.forget(step)

    def keep_only(self, peers: Iterable[str]) -> None:
        """Close the links to volunteers that have left, and forget how fast they were."""
        peers = frozenset(peers)
        self._book.keep_only(peers)
        for gone in self._meters.keys() - peers:
            del self._meters[gone]
        for peer in self._outgoing.keys() - peers:
            self._outgoing.pop(peer).close()

    def close(self) -> None:
        self.keep_only(())
        self._server.close()

    def _open(self, peer: str) -> Link:
        self._generation += 1

        def lost() -> None:
            # The peer was restarted: its place in the roster is void too.
            if self._outgoing.get(peer) is link:
                del self._outgoing[peer]
            self._link_changed(peer, False)

        link = Link(
            self._node,
            peer,
            f"{self._key}.{self._generation}",
            self._tasks,
            _Outgoing(self._book),
            partial(self._link_changed, peer),
            lost,
        )
        self._outgoing[peer] = link
        return link

    async def take(
        self, peer: str, lane: int, header: Mapping[str, Any], payload: Stream, length: int
    ) -> None:
        """Check an incoming tensor's head, take its payload, hand it on."""
        schema, store = self._schema, self._store
        head = decode_head(header, peer)
        if schema is None or store is None or not _due(head, schema):
            await payload.skip()
            return
        due = self._due_bytes(head, schema, peer)
        if length != due:
            raise ProtocolError(f"a {head.kind} of {length} bytes, not {due}", peer=peer)
        try:
            tensor = store.new(head.step_id, length)
        except ArenaFullError as error:
            # The sender keeps it and tries again in a second: memory comes back when the step ends.
            raise RemoteError("HP-MEM-002", "no room for a tensor", peer=peer, why=error.why) from error
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
        self._trace.span(f"from {peer[-6:]}, lane {lane}", _label(head), began, bytes=length)
        self._arrived(peer, head, tensor)

    def _meter_of(self, peer: str) -> Meter:
        return self._meters.setdefault(peer, Meter())

    def _due_bytes(self, head: Head, schema: Schema, peer: str) -> int:
        """The length of its payload, from our own graph and what the run's codec allows."""
        if isinstance(head, ShardHead) or head.coded is None:
            return _nbytes(head, schema)
        try:
            codec = Codec.of(head.coded.codec)
        except ValueError as error:
            raise ProtocolError("a tensor in an unknown codec", peer=peer) from error
        if not self._book.allows(codec, gradient=isinstance(head, GradientHead)):
            raise ProtocolError(f"a tensor in {codec}, which is not of this run", peer=peer)
        return bundle_layout(schema, head).written(codec, head.coded.written)


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

    def __init__(self, plane: DataPlane, peer: str) -> None:
        self._plane = plane
        self._peer = peer

    async def frame(self, channel: Channel, header: Mapping[str, Any], payload: Stream, length: int) -> None:
        await self._plane.take(self._peer, channel.lane, header, payload, length)

    def beat(self, _channel: Channel) -> None:
        """Acknowledgements need no answer of ours."""

    def up(self, _channel: Channel) -> None:
        """The sender watches the link."""

    def down(self, _channel: Channel) -> None:
        """The sender watches the link."""


class _Outgoing:
    """The receiver on our side of a channel that we send on: acknowledgements come back, and how fast it was."""

    def __init__(self, book: LinkBook) -> None:
        self._book = book

    async def frame(
        self, channel: Channel, _header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        await payload.skip()
        raise ProtocolError("a tensor on the wrong side of a channel", peer=channel.peer_id)

    def beat(self, channel: Channel) -> None:
        if channel.rate:
            self._book.arrives(channel.peer_id, channel.rate)

    def up(self, channel: Channel) -> None:
        _log.debug("%r", channel)

    def down(self, channel: Channel) -> None:
        _log.debug("%r", channel)
