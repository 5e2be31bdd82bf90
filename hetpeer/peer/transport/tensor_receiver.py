"""The receiving side of the data plane: tensors over channels opened by others, and grants to these peers.

A head is checked against our graph before a byte of the payload is taken: its block must be ours, its length
what the schema says, and covered by a grant.

A grant says how many bytes a peer may put into our arena (`Intake`). A quarter of its share is for
activations of others and a quarter for their gradients. Half of each quarter is divided equally between the
volunteers of the step, the other half by how much of use they have sent lately: of forty volunteers a few
have the blocks next to ours, and most microbatches of a cluster come from one of them. One largest frame of
each pool always has room. Shards are bounded by what a reduce needs of them. A peer that is not in the step
may send one frame of each kind, which a late joiner needs whose step has not begun here yet; and only a few
such peers at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from hetpeer.averaging.member.tensor_heads import (
    ActivationHead,
    GradientHead,
    Head,
    Introduction,
    ShardHead,
    decode_head,
)
from hetpeer.dht.base.errors import ProtocolError, RemoteError
from hetpeer.dht.channels.channel import Channel
from hetpeer.dht.channels.channel_server import ChannelServer
from hetpeer.dht.streams.abuse import Offence, OffenceError
from hetpeer.dht.streams.flow_control import GrantBudget, GrantLane, HeldBytes, LinkGrants, Pool
from hetpeer.dht.streams.rate_meter import RateMeter
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.transport.tensor_schema import (
    FLOAT_BYTES,
    TensorSchema,
    cost_of,
    is_due,
    kind_of,
    layout_of,
    pool_of,
)
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.peer.transport.uplink import ACTIVATIONS, GRADIENTS, pool_at
from hetpeer.stages.ipc.arena import ArenaFullError
from hetpeer.stages.links.codec import Codec

MAX_PAYLOAD = 1 << 30
KINDS = 3
NOTHING = (GrantBudget(),) * KINDS
SHARE = 0.25
"""Part of the arena's share for the activations of all volunteers together, and again for gradients."""
FADE = 0.5
"""Factor of what a volunteer has sent, with each step and each time that a volunteer comes or goes."""
MOST_LATELY = 0.25
"""Share of that half for one of more than five volunteers, so that none gets it all by sending more."""
MAX_STRANGERS = 8
SLACK = 4096
"""Bytes by which an encoded bundle may exceed the bundle, besides an eighth for positions of a sparse one."""


class Intake:
    """The books of all peers that send to us."""

    def __init__(self) -> None:
        self._capacity = 0
        self._least = (0, 0, 0)
        self._reduce = 0
        self._pools = pool_at(0) + 1
        self._members: frozenset[str] = frozenset()
        self._holdings: dict[str, HeldBytes] = {}
        self._links: dict[str, tuple[str, LinkGrants]] = {}
        self._taken: dict[str, dict[Pool, float]] = {}
        """Volunteer of the step → bytes that were of use lately, by kind of pool."""

    def use(self, schema: TensorSchema | None, capacity: int) -> None:
        """Our place and the bytes of the arena that it may take; without a place there are no grants."""
        self._capacity = capacity if schema is not None else 0
        if schema is not None:
            self._least, self._reduce = _least(schema), _reduce_bytes(schema)
            self._pools = schema.pools.count(schema.blocks - min(schema.specs))
        self._resize()

    def members(self, peers: Iterable[str], linked: Iterable[str]) -> None:
        """`peers` are the volunteers of the step that begins. Forget other peers without a `linked` channel
        or a tensor here.

        What was sent long ago counts less from now on.
        """
        self._members = frozenset(peers)
        kept = self._members.union(linked, (p for p, h in self._holdings.items() if h.held.total()))
        for gone in self._holdings.keys() - kept:
            del self._holdings[gone]
            self._links.pop(gone, None)
        self._taken = {
            peer: {kind: nbytes * FADE for kind, nbytes in taken.items()}
            for peer, taken in self._taken.items()
            if peer in self._members
        }
        self._resize()

    def grants(self, peer: str, key: str, announce: Callable[[], None]) -> LinkGrants:
        """The books of the link that `peer` calls `key`, new ones for a new link."""
        known = self._links.get(peer)
        if known is None or known[0] != key:
            holding = self._holdings.setdefault(peer, HeldBytes())
            grants = LinkGrants(self._budgets(peer), self._pools, holding, announce)
            self._links[peer] = known = (key, grants)
        return known[1]

    def of_use(self, peer: str, head: Head, nbytes: int) -> None:
        """Note that `nbytes` of `peer` were needed here; peers whose tensors are used get larger grants."""
        kind = kind_of(head)
        taken = self._taken.setdefault(peer, {})
        taken[kind] = taken.get(kind, 0.0) + nbytes

    def held(self) -> int:
        """Bytes that tensors of peers take here."""
        return sum(holding.held.total() for holding in self._holdings.values())

    def _resize(self) -> None:
        for peer, (_, grants) in self._links.items():
            grants.resize(self._budgets(peer), self._pools)

    def _budgets(self, peer: str) -> tuple[GrantBudget, ...]:
        """Grants for `peer`: its share of memory, the least for a stranger, nothing beyond MAX_STRANGERS."""
        if not self._capacity:
            return NOTHING
        if peer not in self._members:
            strangers = [other for other in self._holdings if other not in self._members]
            few = peer in strangers[:MAX_STRANGERS]
            return tuple(GrantBudget(least, least) for least in self._least) if few else NOTHING
        gradient, shard, activation = self._least
        return (
            GrantBudget(gradient, max(gradient, self._share(peer, GRADIENTS))),
            GrantBudget(shard, max(shard, self._reduce)),
            GrantBudget(activation, max(activation, self._share(peer, ACTIVATIONS))),
        )

    def _share(self, peer: str, kind: Pool) -> int:
        """Bytes that a volunteer of the step may have here of pools of that kind."""
        equal = 1 / max(1, len(self._members) - 1)
        taken = {one: known.get(kind, 0.0) for one, known in self._taken.items() if one in self._members}
        lately = taken.get(peer, 0.0) / total if (total := sum(taken.values())) else equal
        if equal < MOST_LATELY:
            lately = min(lately, MOST_LATELY)
        return int(self._capacity * SHARE * (equal + lately) / 2)


def _least(schema: TensorSchema) -> tuple[int, int, int]:
    """Bytes of the largest frame of each kind."""
    full = schema.microbatches
    ends = [schema.output_layout(block + 1, full, gradients=True).nbytes for block in schema.specs]
    begins = [schema.input_layout(block, full).nbytes for block in schema.specs]
    shards = [schema.elements(block) * FLOAT_BYTES for block in schema.observed]
    return _with_coded(max(ends)), _with_coded(max(shards)), _with_coded(max(begins))


def _with_coded(nbytes: int) -> int:
    return 2 * nbytes + nbytes // 8 + SLACK


def _reduce_bytes(schema: TensorSchema) -> int:
    """Bytes that one peer may have to send in a plan: its parts of all our shards, and all sums.

    Written by a codec they take up to half as much more.
    """
    return 3 * FLOAT_BYTES * sum(schema.elements(block) for block in schema.observed)


class TensorOwner(Protocol):
    """Callbacks for tensors."""

    def tensor_arrived(self, peer: str, head: Head, tensor: Tensor) -> None:
        """A tensor of `peer` is here."""

    def unread(self, peer: str, head: ActivationHead | GradientHead, why: str) -> None:
        """A bundle of `peer` was refused: its length or codec is wrong."""

    def nudged(self, peer: str, head: ActivationHead) -> None:
        """`peer` sent the head of an activation alone, since the bundle waits there for a grant."""

    def introduced(self, peer: str, head: Introduction) -> None:
        """`peer` says which blocks it holds in a step. Raises `ProtocolError` if its ticket is none."""


class TensorReceiver:
    """All incoming tensor channels of one volunteer."""

    def __init__(self, book: LinkBook, trace: Trace, owner: TensorOwner) -> None:
        self._book = book
        self._trace = trace
        self._owner = owner
        self._intake = Intake()
        self.of_use = self._intake.of_use
        self._meters: dict[str, RateMeter] = {}
        self._server = ChannelServer(lambda _peer, _key: self, MAX_PAYLOAD, self._meter_of)
        self._schema: TensorSchema | None = None
        self._store: TensorStore | None = None

    @property
    def handle(self) -> Callable[[Stream], Awaitable[None]]:
        """Given to `Node.serve`, which keeps it: the server's own, that lets go of us when it is closed."""
        return self._server.handle

    def use(self, schema: TensorSchema | None, store: TensorStore | None) -> None:
        """The place whose schema incoming tensors must fit; None: nothing is taken."""
        self._schema, self._store = schema, store
        self._intake.use(schema, 0 if store is None else store.limit)

    def keep_only(self, peers: frozenset[str]) -> None:
        """Accept tensors from these peers only from now on; forget channels of others that are down."""
        self._server.keep_only(peers)
        self._intake.members(peers, {channel.peer_id for channel in self._server})
        for gone in self._meters.keys() - peers:
            del self._meters[gone]

    def close(self) -> None:
        """Close all channels."""
        self._server.close()

    # ── the channels' receiver ──────────────────────────────────────────────────────────────────────────────

    def up(self, channel: Channel) -> None:
        """A stream is there: the sender watches the link; ours is what it may send."""
        if channel.grant_lane is None:
            channel.grant_lane = self._lane(channel)

    async def beat(self, channel: Channel) -> None:
        """Acknowledgements need no answer of ours."""

    def down(self, channel: Channel) -> None:
        """The sender watches the link."""

    def _lane(self, channel: Channel) -> GrantLane:
        """The books of a channel that `channel.peer_id` has opened."""

        def announce() -> None:
            for other in self._server:
                if other.peer_id == channel.peer_id and other.key == channel.key and other.is_up:
                    other.announce()
                    return

        return self._intake.grants(channel.peer_id, channel.key, announce).lane()

    async def frame(self, channel: Channel, header: Mapping[str, Any], payload: Stream, length: int) -> None:
        """Check an incoming tensor's head, take its payload, hand it on."""
        peer, lane = channel.peer_id, channel.grant_lane
        assert lane is not None
        schema, store = self._schema, self._store
        head = decode_head(header, peer)
        if isinstance(head, Introduction):
            if length:
                raise OffenceError(Offence.LENGTH, f"an introduction of {length} bytes", peer=peer)
            self._owner.introduced(peer, head)
            return
        if schema is None or store is None or not is_due(head, schema):
            await payload.skip()
            return
        if not isinstance(head, ShardHead) and head.id >= schema.ids:
            raise ProtocolError(f"a {head.kind} of microbatch {head.id}, which no step has", peer=peer)
        if isinstance(head, ActivationHead) and not schema.goes_on(head.route):
            raise ProtocolError("a route with gaps, or beyond the model", peer=peer)
        if isinstance(head, ActivationHead) and head.nudge:
            if length:
                raise OffenceError(Offence.LENGTH, f"a nudge of {length} bytes", peer=peer)
            self._owner.nudged(peer, head)
            return
        try:
            self._must_fit(head, schema, peer, length)
        except OffenceError as error:
            if not isinstance(head, ShardHead):
                self._owner.unread(peer, head, error.what)
            raise
        pool, cost = pool_of(head, schema), cost_of(head, length, schema, sending=False)
        lane.claim(pool, cost)
        try:
            tensor = store.new(head.step_id, length)
        except ArenaFullError as error:
            # Grants are less than the arena, but the rest may be fragmented. The sender keeps it and tries
            # again.
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
        if self._trace.on:
            self._trace.span(f"from {peer[-6:]}, lane {channel.lane}", _label(head), began, bytes=length)
        if (
            tensor.released
        ):  # its step has ended meanwhile: nobody waits for it, and its memory is another's by now
            return
        tensor.sender = peer
        store.lend(tensor, lane.settle(pool, cost))
        self._owner.tensor_arrived(peer, head, tensor)

    def _meter_of(self, peer: str) -> RateMeter:
        return self._meters.setdefault(peer, RateMeter())

    def _must_fit(self, head: Head, schema: TensorSchema, peer: str, length: int) -> None:
        """Raises `OffenceError` for a payload of another length than `head` must have."""
        due = self._due_bytes(head, schema, peer)
        if length != due:
            raise OffenceError(Offence.LENGTH, f"a {head.kind} of {length} bytes, not {due}", peer=peer)

    def _due_bytes(self, head: Head, schema: TensorSchema, peer: str) -> int:
        """The length of its payload, from our own graph and what the run's codec allows."""
        if head.coded is None:
            return layout_of(schema, head).nbytes
        try:
            codec = Codec.of(head.coded.codec)
        except ValueError as error:
            raise OffenceError(Offence.CODEC, "a tensor in an unknown codec", peer=peer) from error
        if not self._book.allows(codec, head.kind):
            raise OffenceError(Offence.CODEC, f"a tensor in {codec}, which is not of this run", peer=peer)
        return layout_of(schema, head).written(codec, head.coded.written)


def _label(head: Head) -> str:
    return f"{head.kind} {head.block if isinstance(head, ShardHead) else head.id}"
