"""Sessions of volunteers with a coordinator: admission, rate limits, and the end of sessions.

A session is a channel (dht/channels/channel.py) that begins with a Hello. A peer that is not admitted loses
its channel, as does one that lets messages to it pile up. The host (driver.py) handles the messages.

A session may send nothing but one Hello of a few KiB until it is admitted. Afterwards messages are as long
as the run can need (averaging/messages/bounds.py), and are read at the rate that rate_limit.py and
reading_turns.py allow.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.service.rate_limit import RateLimit
from hetpeer.bootstrap.service.reading_turns import ReadingTurns
from hetpeer.dht.base.errors import ProtocolError, short_id
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import ChannelServer
from hetpeer.dht.streams.stream import Stream

if TYPE_CHECKING:
    from hetpeer.bootstrap.service.driver import CoordinatorService

LOOK_S = 10.0
"""Seconds between two checks. A channel whose peer was not admitted at two checks in a row is closed."""
HEADER_BYTES = 1 << 10
"""Bytes of the header of a frame: number and acknowledgement."""
BEAT_BYTES = 64
"""Bytes that a sign of life counts in the rate limit."""
GIVEN_UP = 3
"""Checks with an admitted peer's stream broken until it is forgotten: its lease has run out by then."""
MAX_UNHEARD = 32 << 20
"""Most unacknowledged bytes to a volunteer: 100 times what one is sent while its stream is broken."""

_log = logging.getLogger(__name__)


class VolunteerSessions:
    """All sessions of one term."""

    def __init__(self, host: CoordinatorService, clock: Clock, bounds: m.MessageBounds) -> None:
        self.host = host
        self.bounds = bounds
        self.turns = ReadingTurns(clock)
        self._clock = clock
        self.inside: set[str] = set()
        """Peers that are admitted."""
        self._outside: set[str] = set()
        """Peers with a channel that were not admitted at the last check."""
        self._broken: Counter[str] = Counter()
        """Admitted peer with a broken stream → checks since then."""
        self._rate_limits: dict[str, RateLimit] = {}
        self._looked = clock.monotonic()
        self._channels = ChannelServer(self._accept, m.MAX_MESSAGE_BYTES, lanes=1, header_limit=HEADER_BYTES)
        self.handle = self._channels.handle
        """The handler for `Node.serve`."""

    def channel(self, peer: str) -> Channel | None:
        """The newest session of `peer`."""
        return self._channels.channels.get((peer, 0))

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._channels)

    def close(self) -> None:
        """Close all sessions."""
        self._channels.close()

    def tell(self, channel: Channel, message: m.Message) -> None:
        """Send a message in a session, if it is open; end it if too much is unacknowledged."""
        if channel.closed:
            return
        channel.send(Parcel({}, (m.encode(message),)))
        if channel.outbox.nbytes > MAX_UNHEARD:
            _log.warning(
                "%s acknowledges nothing that it is told: its session ends", short_id(channel.peer_id)
            )
            channel.close()

    def look(self, now: float) -> bool:
        """Every LOOK_S: forget peers that are gone, and close channels of peers that were not admitted.

        Returns whether it was time.
        """
        if now - self._looked < LOOK_S:
            return False
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
        self._rate_limits = {p: h for p, h in self._rate_limits.items() if p in here or not h.is_rested(now)}
        return True

    def _accept(self, peer: str, _key: str) -> _Session:
        return _Session(self, peer)

    async def in_turn(self, peer: str, nbytes: int, *, session: bool = False) -> RateLimit:
        """Return the limit of `peer` when a message of `nbytes` may be read; `session`: it begins one."""
        now = self._clock.monotonic()
        limit = self._rate_limits.get(peer) or self._rate_limits.setdefault(peer, RateLimit(now))
        if wait := limit.wait(now, session=session):
            await asyncio.sleep(wait)
        limit.heard(nbytes, session=session)
        await self.turns.turn(limit)
        return limit

    @property
    def all_broken(self) -> bool:
        """Whether the streams of all admitted peers are broken: perhaps the fault is our own line's."""
        return bool(self.inside) and self.inside <= self._broken.keys()

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

    def __init__(self, sessions: VolunteerSessions, peer: str) -> None:
        self._sessions = sessions
        self._peer = peer
        self._begun = False

    async def frame(
        self, _channel: Channel, _header: Mapping[str, Any], payload: Stream, length: int
    ) -> None:
        """Pass a message on once the peer's rate limit allows.

        Raises `ProtocolError` if it is malformed, longer than this run can need, or no Hello where the
        session begins. What follows a Hello that was refused is not read.
        """
        sessions, peer, begins = self._sessions, self._peer, not self._begun
        if begins and length > sessions.bounds.hello:
            raise ProtocolError(f"a session that begins with {length} bytes", peer=peer)
        if not begins and peer not in sessions.inside:
            await payload.skip()
            await sessions.in_turn(peer, length)
            return
        data = await payload.receive_bytes(length)
        limit = await sessions.in_turn(peer, length, session=begins)
        with sessions.turns.reading(limit):
            if begins:
                message: m.Message = m.decode_hello(data, sessions.bounds)
                self._begun = True
            else:
                message = m.decode_from_volunteer(data, sessions.bounds, len(sessions.inside))
                if isinstance(message, m.Hello):
                    raise ProtocolError("a session that begins twice", peer=peer)
            if not isinstance(message, m.EventLine):
                sessions.host.received(peer, message)
        if isinstance(message, m.EventLine):
            await sessions.host.evidence(peer, message.line)

    async def beat(self, _channel: Channel) -> None:
        """Note a sign of life, within the peer's rate limit."""
        limit = await self._sessions.in_turn(self._peer, BEAT_BYTES)
        if self._begun and self._peer in self._sessions.inside:
            with self._sessions.turns.reading(limit):
                self._sessions.host.received(self._peer, m.Heartbeat())

    def up(self, _channel: Channel) -> None:
        self._sessions.resumed(self._peer)

    def down(self, channel: Channel) -> None:
        if not channel.closed:
            self._sessions.broken(self._peer)


async def briefly(awaitable: Awaitable[Any]) -> None:
    """Wait up to two seconds for a volunteer to acknowledge the last message."""
    try:
        async with asyncio.timeout(2.0):
            await awaitable
    except TimeoutError:
        _log.debug("a volunteer did not acknowledge the last message in time")
