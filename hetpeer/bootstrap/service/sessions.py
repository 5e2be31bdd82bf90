"""The sessions of volunteers with a coordinator: who was let in, how much each is listened to, and when a session is over.

A session is a channel (dht/channels/channel.py) that begins with a Hello. Who holds one without being let in loses it, and so does who lets what it is told
pile up. What is said, and answered, is the business of the `SessionHost` (driver.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.service.rate_limit import RateLimit
from hetpeer.dht.base.clock import Clock
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.printable import short_id
from hetpeer.dht.channels.channel import Channel
from hetpeer.dht.channels.channel_server import ChannelServer
from hetpeer.dht.channels.outbox import Parcel
from hetpeer.dht.streams.stream import Stream

LOOK_S = 10.0
"""Who has a session and was let in neither at one look nor at the next has none any more."""
GIVEN_UP = 3
"""Looks at which the stream of somebody who was let in is broken: its lease has run out long ago."""
MAX_UNHEARD = 32 << 20
"""Bytes that wait for a volunteer which acknowledges nothing: a hundred times what is said to one while its stream is broken."""

_log = logging.getLogger(__name__)


class SessionHost(Protocol):
    """Who is told what happens in sessions."""

    def received(self, peer: str, message: m.Message) -> None:
        """`peer` says something."""

    def broken(self, peer: str) -> None:
        """The stream of `peer` broke."""

    def resumed(self, peer: str) -> None:
        """The stream of `peer` is there, or there again."""


class VolunteerSessions:
    """All sessions of one reign."""

    def __init__(self, host: SessionHost, clock: Clock) -> None:
        self.host = host
        self._clock = clock
        self.inside: set[str] = set()
        """Peers that were let in."""
        self._outside: set[str] = set()
        """Those that had a session at the last look, and were not let in."""
        self._broken: Counter[str] = Counter()
        """Who was let in, and whose stream is broken → looks since then."""
        self._hearings: dict[str, RateLimit] = {}
        self._looked = clock.monotonic()
        self._channels = ChannelServer(self._accept, m.MAX_MESSAGE_BYTES, lanes=1)

    @property
    def handle(self) -> Callable[[Stream], Awaitable[None]]:
        """Given to `Node.serve`."""
        return self._channels.handle

    def channel(self, peer: str) -> Channel | None:
        """The newest session of `peer`."""
        return self._channels.channel(peer)

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._channels)

    def close(self) -> None:
        """No session any more."""
        self._channels.close()

    def tell(self, channel: Channel, message: m.Message) -> None:
        """Say something in a session, if that is not over. One in which nothing is acknowledged ends: a lease runs out then, unless another session begins."""
        if channel.closed:
            return
        channel.send(Parcel({}, (m.encode(message),)))
        if channel.outbox.nbytes > MAX_UNHEARD:
            _log.warning(
                "%s acknowledges nothing that it is told: its session ends", short_id(channel.peer_id)
            )
            channel.close()

    def look(self, now: float) -> None:
        """Now and then: who is not here any more, or does not say what it is here for, is forgotten."""
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self._broken.update(list(self._broken))
        for peer in [peer for peer, looks in self._broken.items() if looks >= GIVEN_UP]:
            del self._broken[peer]
            self.inside.discard(peer)
        outside = {channel.peer_id for channel in self} - self.inside
        for channel in self:
            if channel.peer_id in outside & self._outside:
                channel.close()
        self._channels.keep_only(self.inside | (outside - self._outside))
        self._outside = outside
        here = {channel.peer_id for channel in self}
        self._hearings = {p: h for p, h in self._hearings.items() if p in here or not h.is_rested(now)}

    def _accept(self, peer: str, _key: str) -> _Session:
        return _Session(self, peer)

    async def in_turn(self, peer: str, message: m.Message, nbytes: int) -> None:
        """Return when a message of `peer` may be listened to."""
        session = isinstance(message, m.Hello)
        hearing = self._hearings.setdefault(peer, RateLimit(self._clock.monotonic()))
        if wait := hearing.wait(self._clock.monotonic(), session=session):
            await asyncio.sleep(wait)
        hearing.heard(nbytes, session=session)

    def broken(self, peer: str) -> None:
        """The stream of `peer` broke."""
        if peer in self.inside:
            self._broken[peer] = 0
        self.host.broken(peer)

    def resumed(self, peer: str) -> None:
        """The stream of `peer` is there."""
        self._broken.pop(peer, None)
        self.host.resumed(peer)


class _Session:
    """The receiver of one volunteer's control channel."""

    def __init__(self, reception: VolunteerSessions, peer: str) -> None:
        self._reception = reception
        self._peer = peer
        self._begun = False

    async def frame(
        self, _channel: Channel, _header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        data = await payload.receive_bytes(m.MAX_MESSAGE_BYTES)
        message = m.decode(data)
        if isinstance(message, m.Hello):
            if self._begun:
                raise ProtocolError("a session that begins twice", peer=self._peer)
            self._begun = True
        await self._reception.in_turn(self._peer, message, len(data))
        self._reception.host.received(self._peer, message)

    def beat(self, _channel: Channel) -> None:
        self._reception.host.received(self._peer, m.Heartbeat())

    def up(self, _channel: Channel) -> None:
        self._reception.resumed(self._peer)

    def down(self, channel: Channel) -> None:
        if not channel.closed:
            self._reception.broken(self._peer)
