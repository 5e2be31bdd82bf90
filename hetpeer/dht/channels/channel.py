"""A channel: frames to one peer, in order and exactly once, across broken streams.

A stream ends when p2pd restarts or a connection drops. A channel outlives it: each side numbers its frames
and keeps them until the other has acknowledged them (`Outbox`, pure); a new stream goes on where the last one
ended. The channel is lost only when the process of a side was restarted; its owner starts again from nothing.

`Channel` moves frames for both sides; `dial` and `ChannelServer` (channel_server.py) open streams.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.base.runtime import heed_cancellation
from hetpeer.dht.streams import flow_control
from hetpeer.dht.streams.flow_control import GrantLane
from hetpeer.dht.streams.frame import MAX_HEADER
from hetpeer.dht.streams.rate_meter import RateMeter
from hetpeer.dht.streams.stream import Stream

BEAT_S = 1.0
"""Most seconds without a sign of life: an idle side acknowledges. Silence means frozen or cut off."""
ACK_S = 0.05
"""Seconds that an acknowledgement waits for a frame to join: alone it costs as much as a small frame."""
SILENCE_S = 8.0
"""Seconds after which a stream is given up if nothing came from its peer in any stream."""
MIN_RATE, MAX_RATE = 1.0, 1e15
"""Bounds in bytes/s on what a peer may claim; no link is slower or faster."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One frame to send: a header of plain data and buffers that must not change until `done`."""

    header: Mapping[str, Any]
    payload: tuple[Any, ...] = ()
    tag: object = None
    """Identifies the frame for `Outbox.forget`."""
    pool: flow_control.Pool = 0
    cost: int = 0
    """Bytes that the frame takes of the peer's grant; 0 if the channel has no grants."""
    done: Callable[[], None] | None = None
    """Called once its buffers are free: acknowledged, forgotten or channel ended, and not being sent."""
    depart: Callable[[], Parcel | None] | None = None
    """Returns the parcel to send instead of this one (no payload yet) when its turn comes; None: not now."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(map(len, self.payload))


class Outbox:
    """Frames in the order of their numbers, kept until acknowledged."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.arrived = 0
        """Payload bytes of all acknowledged frames."""
        self.spent: Counter[flow_control.Pool] = Counter()
        """Bytes of grants that all frames added so far take, kept or not."""
        self.nbytes = 0
        """Payload bytes of the frames that are kept."""
        self._next = 1
        self._kept: deque[tuple[int, Parcel]] = deque()
        self._totals: dict[int, int] = {}
        self._going: Parcel | None = None
        self._let_go = False

    def add(self, parcel: Parcel) -> None:
        """Append a frame with the next number."""
        self._kept.append((self._next, parcel))
        self.nbytes += parcel.nbytes
        if parcel.cost:
            self.spent[parcel.pool] += parcel.cost
            self._totals[self._next] = self.spent[parcel.pool]
        self._next += 1

    def spent_with(self, number: int, parcel: Parcel) -> dict[flow_control.Pool, int]:
        """Total spent in the pool of frame `number`, up to and including that frame."""
        return {parcel.pool: self._totals[number]} if parcel.cost else {}

    def acknowledge(self, number: int) -> None:
        """Drop the frames up to `number`: the peer has them."""
        self.acknowledged = max(self.acknowledged, number)
        while self._kept and self._kept[0][0] <= number:
            number_there, parcel = self._kept.popleft()
            self._totals.pop(number_there, None)
            self.arrived += parcel.nbytes
            self.nbytes -= parcel.nbytes
            self._over(parcel)

    def forget(self, tag: object) -> None:
        """Drop the frames tagged so; their numbers are skipped."""
        left = [item for item in self._kept if item[1].tag is None or item[1].tag != tag]
        gone = [parcel for _, parcel in self._kept if parcel.tag is not None and parcel.tag == tag]
        self._totals = {number: self._totals[number] for number, _ in left if number in self._totals}
        self._kept = deque(left)
        self.nbytes = sum(parcel.nbytes for _, parcel in left)
        for parcel in gone:
            self._over(parcel)

    def drop(self) -> None:
        """Drop all frames, since the channel ends."""
        kept, self._kept = self._kept, deque()
        self.nbytes = 0
        for _, parcel in kept:
            self._over(parcel)

    @contextmanager
    def sending(self, parcel: Parcel) -> Iterator[None]:
        """Hold the frame's buffers during the block: they are not free before its end, whatever happens."""
        self._going, self._let_go = parcel, False
        try:
            yield
        finally:
            self._going = None
            if self._let_go:
                self._over(parcel)

    def after(self, number: int) -> tuple[int, Parcel] | None:
        """The first frame with a higher number; None if there is none."""
        return next((item for item in self._kept if item[0] > number), None)

    def _over(self, parcel: Parcel) -> None:
        if parcel is self._going:
            self._let_go = True
        elif parcel.done is not None:
            parcel.done()

    def __len__(self) -> int:
        return len(self._kept)


class ChannelReceiver(Protocol):
    """Callbacks of a channel's owner. Nothing more is read before `frame` or `beat` returns.

    `frame` must take the payload from the stream before it returns.
    """

    async def frame(self, channel: Channel, header: Mapping[str, Any], payload: Stream, length: int) -> None:
        """A new frame: its header and payload length; `payload` is the stream to take the payload from."""

    async def beat(self, channel: Channel) -> None:
        """A sign of life without a new frame."""

    def up(self, channel: Channel) -> None:
        """A stream is there."""

    def down(self, channel: Channel) -> None:
        """The stream is gone."""


class Channel:
    """One side of a channel with `peer_id`. `send` never waits: frames queue up while there is no stream.

    Two peers may have several channels at a time, each in a `lane` of its own; a new one replaces the old one
    in its lane. The dialling side:

        channel = Channel(peer_id, key="example", receiver=receiver, payload_limit=1 << 20)
        tasks.spawn(dial(node, "example/1", channel), name="dial")
        channel.send(Parcel({"kind": "question"}, (payload,)))
        await channel.drained()  # the peer has acknowledged it
    """

    def __init__(
        self,
        peer_id: str,
        key: str,
        receiver: ChannelReceiver,
        payload_limit: int,
        lane: int = 0,
        header_limit: int = MAX_HEADER,
    ) -> None:
        self.peer_id = peer_id
        self.key = key
        self.lane = lane
        self.outbox = Outbox()
        self.received = 0
        """Number of the last frame that we received; a later frame counts only if its number is higher."""
        self.address = ""
        """Address from which the peer connected last; empty if it never connected to us."""
        self.meter: RateMeter | None = None
        """Measures the rate of arrival; the result is sent to the peer."""
        self.rate = 0.0
        """Bytes/s at which our frames arrive, as the peer says; 0: unknown."""
        self.trip_s = math.inf
        """Best round trip in seconds, of the dialling side."""
        self.queue: flow_control.GrantQueue[Parcel] | None = None
        """Frames that wait for the peer's grants, where it limits us; told of each new grant."""
        self.grant_lane: GrantLane | None = None
        """Account of what the peer may send in this lane, where we limit it."""
        self.offended: Callable[[ProtocolError], None] = _ignored
        """Called with the peer's offences."""
        self.closed = False
        self._pace = math.inf
        self._receiver = receiver
        self._payload_limit, self._header_limit = payload_limit, header_limit
        self._wake = asyncio.Event()
        self._stream: Stream | None = None
        self._owing = False
        self._ack_timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._carrying = asyncio.Lock()

    def __repr__(self) -> str:
        state = "closed" if self.closed else ("up" if self._stream else "down")
        return f"<Channel {self.key} to {self.peer_id[-6:]} {state}, {len(self.outbox)} unacknowledged>"

    @property
    def is_up(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    def send(self, parcel: Parcel) -> None:
        """Queue a frame, sent once there is a stream, and again if that breaks before it is acknowledged."""
        self.outbox.add(parcel)
        self._drained.clear()
        self._wake.set()

    def pace_to(self, rate: float) -> None:
        """Send at most `rate` bytes/s (`ByteTransport.pace_to`), over this stream and later ones."""
        self._pace = rate
        if self._stream is not None:
            self._stream.pace_to(rate)

    def close(self) -> None:
        """End the channel; frames that were not sent are dropped."""
        self.closed = True
        self.outbox.drop()
        self._wake.set()
        self._drained.set()
        if self._stream is not None:
            self._stream.close()

    async def drained(self) -> None:
        """Return when the peer has acknowledged everything sent so far."""
        while len(self.outbox) and not self.closed:
            self._drained.clear()
            await self._drained.wait()

    async def carry(self, stream: Stream, peer_has: int) -> None:
        """Move frames both ways over `stream` until it breaks, the peer offends or the channel is closed.

        `peer_has`: number of the last frame that the peer received.
        """
        if self._stream is not None:
            self._stream.abort()
        async with self._carrying:  # one reader at a time, or a frame could count twice
            await self._carry(stream, peer_has)

    async def _carry(self, stream: Stream, peer_has: int) -> None:
        """Use `stream` for the channel until it breaks; the peer has our frames up to `peer_has`."""
        if self.closed:  # another channel has replaced this one; its frames must not count
            stream.abort()
            return
        self.outbox.acknowledge(peer_has)
        self._owing = True
        self._stream = stream
        stream.pace_to(self._pace)
        self._receiver.up(self)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(stream, peer_has))
                await self._read(stream)
        except* ProtocolError as group:
            _log.debug("%r: %s", self, group.exceptions[0])
            self.offended(group.exceptions[0])  # type: ignore[arg-type]  # not nested: its tasks have no groups
        except* RemoteError as group:
            _log.debug("%r: %s", self, group.exceptions[0])
        finally:
            stream.abort()
            if self._stream is stream:
                self._stream = None
                self._receiver.down(self)
        heed_cancellation()

    async def _write(self, stream: Stream, sent: int) -> None:
        """Send frames, acknowledgements and beats on `stream`; the peer has our frames up to `sent`."""
        while not self.closed:
            self._wake.clear()
            item = self.outbox.after(sent)
            if item is not None:
                sent, parcel = item
                self._owing = False
                spent = self.outbox.spent_with(sent, parcel)
                head = {"n": sent, **self._acknowledgement(spent), "m": parcel.header}
                with self.outbox.sending(parcel):
                    await stream.send(head, *parcel.payload)
                continue
            if self._owing and self._ack_timer is None:
                self._owing = False
                await stream.send(self._acknowledgement(self.outbox.spent))
                continue
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                self._owing = True
        raise PeerLostError(self.peer_id, "the channel was closed")

    def _acknowledgement(self, spent: Mapping[flow_control.Pool, int]) -> dict[str, Any]:
        """Fields of every frame: acknowledged number, send time, rate of arrival, bytes spent, our grants."""
        fields: dict[str, Any] = {"a": self.received, "t": asyncio.get_running_loop().time()}
        if self.meter is not None and self.meter.rate:
            fields["r"] = self.meter.rate
        if spent:
            fields["s"] = list(spent.items())
        if self.grant_lane is not None:
            base, pools = self.grant_lane.grants.said()
            fields |= {"b": list(base), "g": list(pools.items())}
        return fields

    def _measure(self, sent: Any, nbytes: int) -> None:
        if self.meter is not None and isinstance(sent, float) and math.isfinite(sent):
            self.meter.arrived(sent, asyncio.get_running_loop().time(), nbytes)

    async def _read(self, stream: Stream) -> None:
        """Take frames from `stream`; frames that we had before are skipped. Raises `ProtocolError`."""
        while True:
            frame = await stream.receive(
                payload_limit=self._payload_limit, header_limit=self._header_limit, silence_s=SILENCE_S
            )
            header = frame.header
            acknowledged, number, message = header.get("a"), header.get("n"), header.get("m")
            if not isinstance(acknowledged, int):
                raise ProtocolError("a frame without acknowledgement", peer=self.peer_id)
            self.outbox.acknowledge(acknowledged)
            if not len(self.outbox):
                self._drained.set()
            rate = header.get("r")
            if isinstance(rate, float) and MIN_RATE <= rate < MAX_RATE:
                self.rate = rate
            if self.queue is not None and "b" in header:
                self.queue.granted(
                    flow_control.unpack_base(header["b"]), flow_control.unpack(header.get("g"))
                )
            if number is None:
                if frame.payload_length:
                    raise ProtocolError("a payload without a number", peer=self.peer_id)
                self._measure(header.get("t"), 0)
                if self.grant_lane is not None:
                    self.grant_lane.offered(flow_control.unpack(header.get("s")))
                    self.grant_lane.settle()
                await self._receiver.beat(self)
                continue
            if not isinstance(number, int) or not isinstance(message, dict):
                raise ProtocolError("a frame without number or message", peer=self.peer_id)
            if number <= self.received:
                await stream.skip()
                await self._receiver.beat(self)
                continue
            if self.grant_lane is not None:
                self.grant_lane.offered(flow_control.unpack(header.get("s")))
            await self._receiver.frame(self, message, stream, frame.payload_length)
            if self.grant_lane is not None:
                self.grant_lane.settle()  # what the receiver did not keep
            self._measure(header.get("t"), frame.payload_length)
            self.received = number
            self.announce()

    def announce(self) -> None:
        """Acknowledge soon, and tell the peer of new grants."""
        self._owing = True
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._ack_timer = None
        self._wake.set()


def _ignored(_error: ProtocolError) -> None:
    """Ignore offences."""
