"""Tensors from volunteer to volunteer: one link for each direction of each pair.

Outgoing links are opened when there is something to send and closed when the peer has left. The receiving
side is in tensor_receiver.py. Offences of a peer are counted; after a few of them it is refused for a while.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Protocol

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.tensor_heads import ActivationHead, Head, Introduction, ShardHead
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.channels.channel import Parcel
from hetpeer.dht.node.node import Node
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.transport.link import TENSORS, Link, LinkTraffic
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.transport.tensor_receiver import TensorOwner, TensorReceiver
from hetpeer.peer.transport.tensor_schema import TensorSchema, cost_of, pool_of
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.peer.transport.uplink import UplinkShares


class PlaneOwner(TensorOwner, Protocol):
    """Callbacks for tensors and links."""

    def link_changed(self, peer: str, is_up: bool) -> None:
        """Our link to `peer` is down, or up again."""

    def link_congested(self, peer: str, blocks: int | None) -> None:
        """Hold back forwards to `peer` that have `blocks` or more blocks to go to the loss; None: none."""

    def refused(self, peer: str, for_now: bool) -> None:
        """`peer` has offended too often and is shunned `for_now`, or is accepted again."""


class DataPlane:
    """All tensor channels of one volunteer."""

    def __init__(
        self, node: Node, key: str, tasks: TaskSet, book: LinkBook, trace: Trace, owner: PlaneOwner
    ) -> None:
        self._node = node
        self._me = node.peer_id
        self._key = key
        self._tasks = tasks
        self._book = book
        self._owner = owner
        self.link_changed, self.link_congested = owner.link_changed, owner.link_congested
        self.offended = node.listener.offended
        self._receiving = TensorReceiver(book, trace, owner)
        self.of_use = self._receiving.of_use
        self._pacing = UplinkShares()
        self._outgoing: dict[str, Link] = {}
        self._generation = 0
        self._members: frozenset[str] = frozenset()
        self._word: Introduction | None = None
        self._introduced: set[str] = set()
        self._schema: TensorSchema | None = None
        self._store: TensorStore | None = None
        node.listener.watchers.append(owner.refused)

    async def start(self) -> None:
        """Accept tensors of others."""
        await self._node.serve(TENSORS, self._receiving.handle)

    def use(self, schema: TensorSchema | None, store: TensorStore | None) -> None:
        """The place whose schema incoming tensors must fit; None: nothing is taken."""
        self._schema, self._store = schema, store
        self._receiving.use(schema, store)

    def send(self, peer: str, head: Head, tensor: Tensor) -> None:
        """Queue a tensor for `peer`. Its bytes are read when its turn comes; it stays in place until they
        have arrived.

        A tensor for ourselves is there at once. Raises ArenaFullError if it is for ourselves, is in the spill
        file, and finds no room in the arena.
        """
        assert self._store is not None
        assert self._schema is not None
        if peer == self._me:
            self._store.bring_back(tensor)
            shared = self._store.share(tensor)  # what was sent is not changed any more
            if tensor.once:
                self._store.release(tensor)
            self._owner.tensor_arrived(peer, head, shared)
            return
        link = self._outgoing.get(peer) or self._open(peer)
        if self._word is not None and self._word.ticket and peer not in self._introduced:
            self.introduce(peer)
        nbytes = tensor.nbytes
        cost, pool = cost_of(head, nbytes, self._schema, sending=True), pool_of(head, self._schema)
        done = partial(self._arrived, peer, head) if isinstance(head, ShardHead) else None
        parcel = Parcel(head.model_dump(), tag=tensor.step, pool=pool, cost=cost, done=done)
        link.send(replace(parcel, depart=partial(self._store.depart, tensor, parcel)))

    def nudge(self, peer: str, head: ActivationHead, nbytes: int) -> None:
        """Send `head` ahead, without a bundle, if its bundle of `nbytes` may have to wait for a grant.

        Used when an activation is sent again: the receiver may answer from what it kept.
        """
        assert self._schema is not None
        if (link := self._outgoing.get(peer)) is not None:
            alone = head.model_copy(update={"nudge": True, "coded": None})
            most = 2 * nbytes  # a coded bundle, and room to decode it
            link.nudge(Parcel(alone.model_dump(), tag=head.step_id, pool=pool_of(head, self._schema)), most)

    def introduction(self, word: Introduction | None) -> None:
        """Set our introduction in this step; with a ticket, it precedes the first tensor to each peer."""
        self._word = word
        self._introduced.clear()

    def introduce(self, peer: str) -> None:
        """Introduce us to `peer` now, and ask for the work that it keeps for us."""
        assert self._word is not None
        self._introduced.add(peer)
        link = self._outgoing.get(peer) or self._open(peer)
        link.tell(Parcel(self._word.model_dump(), tag=self._word.step_id))

    def share_uplink(self, step: StepId, loads: Mapping[str, int]) -> None:
        """Divide the uplink so that links finish the reduce of `step` together; `loads`: peer → any unit."""
        self._pacing.begin(step, loads)
        self._pace()

    def end_step(self, step: StepId) -> None:
        """Tensors of `step` need not be delivered any more; their memory is about to be reused."""
        reduced = self._pacing.end(step)
        for link in self._outgoing.values():
            link.forget(step)
        if reduced:
            self._pace()

    def keep_only(self, peers: Iterable[str]) -> None:
        """Keep links to `peers`, the volunteers of the new step: close all others and forget their rates."""
        peers = self._members = frozenset(peers)
        self._book.keep_only(peers)
        self._receiving.keep_only(peers)
        self._node.listener.members = peers
        for peer in self._outgoing.keys() - peers:
            self._outgoing.pop(peer).close()
            self.link_congested(peer, None)

    def admit(self, peer: str) -> None:
        """One more volunteer of the step in progress."""
        if peer not in self._members:
            self.keep_only(self._members | {peer})

    def drop_peers(self, peers: Iterable[str]) -> None:
        """Drop the tensors on their way to peers that have left the step, and free their memory."""
        self.keep_only(self._members.difference(peers))

    def close(self) -> None:
        """Close all links."""
        self.keep_only(())
        self._receiving.close()
        self._node.listener.watchers.remove(self._owner.refused)

    def _open(self, peer: str) -> Link:
        self._generation += 1
        link = Link(self._node, peer, f"{self._key}.{self._generation}", self._tasks, self)
        self._outgoing[peer] = link
        self._pace()
        return link

    def _arrived(self, peer: str, head: ShardHead) -> None:
        if self._pacing.arrived(head.step_id, peer, head.end - head.begin):
            self._pace()

    def _pace(self) -> None:
        rates = self._pacing.rates(self._book.reducing.rate)
        for peer, link in self._outgoing.items():
            link.pace_to(rates.get(peer, math.inf))

    # ── what links say ──────────────────────────────────────────────────────────────────────────────────────

    def link_lost(self, link: Link) -> None:
        """The peer of `link` was restarted: its place in the roster is void too."""
        if self._outgoing.get(link.peer_id) is link:
            del self._outgoing[link.peer_id]
            self.link_congested(link.peer_id, None)
        self.link_changed(link.peer_id, False)

    def link_moved(self, link: Link, traffic: LinkTraffic) -> None:
        """Something was sent or acknowledged on `link`: measure it, and the uplink."""
        if traffic.rate:
            self._book.measured(link.peer_id, traffic.rate, traffic.trip_s)
        every = [traffic if one is link else one.traffic for one in self._outgoing.values()]
        busy, now = [one for one in every if one.frames], time.monotonic()
        arrived, waiting = sum(one.arrived for one in every), sum(one.waiting for one in busy)
        trip_s = median(one.trip_s for one in busy) if busy else 0.0
        self._book.outflow.look(now, len(busy), arrived, waiting, trip_s)
        self._book.reducing.look(now, len(busy) if self._pacing.reduces else 0, arrived, waiting, trip_s)
