"""A link: carries tensors to one other volunteer, over a few streams at a time.

One stream does not fill a long or a fast link: it waits for windows to open, and for its own frames to be
read one by one. A second and a third lane are opened when the earlier ones have something under way. A frame
without a grant waits here, before it has a number and a lane, so that others pass it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from hetpeer.dht.base.errors import PeerLostError, ProtocolError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import dial
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.abuse import Offence, OffenceError
from hetpeer.dht.streams.flow_control import GrantQueue
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.transport.uplink import Pressure

TENSORS: Final = "hetpeer/1/tensors"
LANES = 3
"""Lanes over libp2p. A direct TCP connection fills the line alone; several would hinder each other."""
ALIKE = 0.02
"""Relative change of a pace below which the pace is left as it is."""
GRACE_S = 1.5
"""Seconds that a link may be down before its tasks are sent elsewhere (a restart of p2pd)."""

_log = logging.getLogger(__name__)


class LinkTraffic(NamedTuple):
    """Traffic of a link, over all its lanes."""

    frames: int
    """Frames under way."""
    waiting: int
    """Bytes of payload that the peer has not acknowledged."""
    arrived: int
    """Bytes of payload that the peer has acknowledged."""
    rate: float
    """Bytes/s of arrival, as the peer states; 0: unknown."""
    trip_s: float
    """Round-trip time in seconds, the best so far; infinite before the first answer."""


class LinkOwner(Protocol):
    """Callbacks of a link."""

    def link_changed(self, peer: str, is_up: bool) -> None:
        """The link has been down for longer than the grace, or is up again."""

    def link_lost(self, link: Link) -> None:
        """The peer does not know us any more: what was under way is void, and the link is closed."""

    def link_moved(self, link: Link, traffic: LinkTraffic) -> None:
        """Frames left on `link`, or were acknowledged."""

    def link_congested(self, peer: str, blocks: int | None) -> None:
        """Hold back forwards to `peer` that have `blocks` or more blocks to go to the loss; None: none."""

    def offended(self, peer: str, error: ProtocolError) -> None:
        """`peer` did what no honest peer does."""


class Link:
    """The way to `peer_id`, and the receiver of what comes back on it: acknowledgements alone."""

    def __init__(self, node: Node, peer_id: str, key: str, tasks: TaskSet, owner: LinkOwner) -> None:
        self.peer_id = peer_id
        self.closed = False
        self._node = node
        self._key = key
        self._tasks = tasks
        self._owner = owner
        self._lanes: list[Channel] = []
        self._rate = math.inf
        self._queue: GrantQueue[Parcel] = GrantQueue()
        self._pressure = Pressure()
        self._open()
        tasks.spawn(self._watch(), name=f"link to {peer_id}")

    def __repr__(self) -> str:
        return f"<Link to {self.peer_id[-6:]}, {len(self._queue)} without a grant, {self._lanes}>"

    @property
    def is_up(self) -> bool:
        """Whether a stream is open."""
        return any(lane.is_up for lane in self._lanes)

    @property
    def traffic(self) -> LinkTraffic:
        """Frames and bytes under way now, and the rate of arrival."""
        frames, waiting, arrived, rate, trip_s = 0, 0, 0, 0.0, math.inf
        for lane in self._lanes:  # one loop: this runs with every acknowledgement, for every link
            outbox = lane.outbox
            frames += len(outbox)
            waiting += outbox.nbytes
            arrived += outbox.arrived
            rate, trip_s = max(rate, lane.rate), min(trip_s, lane.trip_s)
        return LinkTraffic(frames, waiting, arrived, rate, trip_s)

    def send(self, parcel: Parcel) -> None:
        """Queue a frame. With a grant, it goes on the lane with least under way; frames may overtake it."""
        self._queue.add(parcel)
        self._go_on()

    def nudge(self, parcel: Parcel, cost: int) -> None:
        """Send a frame that needs no grant, if one of its pool with `cost` would have to wait for one."""
        if self._queue.is_short(parcel.pool, cost):
            self.tell(parcel)

    def tell(self, parcel: Parcel) -> None:
        """Send a frame without payload, ahead of frames that wait for a grant."""
        min(self._lanes, key=_under_way).send(parcel)

    def pace_to(self, rate: float) -> None:
        """Send at most `rate` bytes/s from now on, where the system supports it; infinite: no limit."""
        if rate == self._rate or abs(rate / self._rate - 1) < ALIKE:
            return
        self._rate = rate
        for lane in self._lanes:
            lane.pace_to(rate)

    def forget(self, tag: object) -> None:
        """Frames tagged so need not arrive any more."""
        self._queue.forget(tag)
        for lane in self._lanes:
            lane.outbox.forget(tag)
        # Not at once: the step that ends must be cleared away before the next one begins work because of it.
        asyncio.get_running_loop().call_soon(self._go_on)

    def close(self) -> None:
        """End the link; frames that have not arrived are dropped."""
        self.closed = True
        for lane in self._lanes:
            lane.close()

    # ── the lanes' receiver ─────────────────────────────────────────────────────────────────────────────────

    async def frame(
        self, channel: Channel, _header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        """Raises `OffenceError`: a receiver of tensors sends none back on the same channel."""
        await payload.skip()
        raise OffenceError(
            Offence.WRONG_SIDE, "a tensor on the wrong side of a channel", peer=channel.peer_id
        )

    async def beat(self, _channel: Channel) -> None:
        """Acknowledgements or grants have come."""
        self._go_on()

    def up(self, channel: Channel) -> None:
        """A lane has a stream."""
        _log.debug("%r", channel)

    def down(self, channel: Channel) -> None:
        """A lane has lost its stream, and opens another."""
        _log.debug("%r", channel)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _offended(self, error: ProtocolError) -> None:
        self._owner.offended(self.peer_id, error)

    def _go_on(self) -> None:
        """Send frames that have a grant, and judge whether the link keeps up."""
        if self.closed:
            return
        while (parcel := self._queue.next()) is not None:
            if parcel.depart is not None:
                loaded = parcel.depart()
                if loaded is None:  # no room for it in memory: once something else has arrived
                    self._queue.put_back(parcel)
                    break
                parcel = loaded
            self._next_lane().send(parcel)
        short, traffic = self._queue.pools, self.traffic
        self._owner.link_moved(self, traffic)
        if self._pressure.judge(short, traffic.frames, traffic.waiting, traffic.rate):
            self._owner.link_congested(self.peer_id, self._pressure.held)

    def _next_lane(self) -> Channel:
        """The lane with the fewest bytes under way; a new lane if all have some and there may be more."""
        if len(self._lanes) == 1 and not len(self._lanes[0].outbox):
            return self._lanes[0]
        most = 1 if self.peer_id in self._node.direct.leads else LANES  # one if lanes bypass libp2p
        idle = min(self._lanes[:most], key=_under_way)
        return self._open() if len(idle.outbox) and len(self._lanes) < most else idle

    def _open(self) -> Channel:
        lane = Channel(self.peer_id, self._key, self, payload_limit=0, lane=len(self._lanes))
        lane.queue = self._queue
        lane.offended = self._offended
        lane.pace_to(self._rate)
        self._lanes.append(lane)
        self._tasks.spawn(self._keep_dialling(lane), name=f"tensors to {self.peer_id}, lane {lane.lane}")
        return lane

    async def _keep_dialling(self, lane: Channel) -> None:
        try:
            await dial(self._node, TENSORS, lane)
        except PeerLostError as error:
            _log.debug("%r: %s", lane, error)
            if not self.closed:
                self.close()
                self._owner.link_lost(self)

    async def _watch(self) -> None:
        """Tell the owner that the link is down after the grace, or up again."""
        told_down = False
        while not self.closed:
            await asyncio.sleep(GRACE_S / 3)
            if self.is_up:
                if told_down:
                    told_down = False
                    self._owner.link_changed(self.peer_id, True)
            elif not told_down and not await self._comes_back():
                told_down = True
                self._owner.link_changed(self.peer_id, False)

    async def _comes_back(self) -> bool:
        deadline = asyncio.get_running_loop().time() + GRACE_S
        while asyncio.get_running_loop().time() < deadline and not self.closed:
            if self.is_up:
                return True
            await asyncio.sleep(GRACE_S / 10)
        return self.is_up or self.closed


def _under_way(lane: Channel) -> int:
    """Bytes that are not acknowledged."""
    return lane.outbox.nbytes
