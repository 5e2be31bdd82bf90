"""Sessions of volunteers with a coordinator: admission, rate limits, and the end of sessions.

A session is a channel (dht/channels/channel.py) that begins with a Hello. A peer that is not admitted loses
its channel, as does one that lets messages to it pile up. The host (driver.py) handles the messages.

Each peer has a rate limit: excess messages are delayed, never dropped; other peers are unaffected. The limit
is set so that no peer keeps the event loop and the parser busy (SECURITY.md). A new session of a known
volunteer is costly, since its departure is logged and others repeat its work: few are allowed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hetpeer.averaging import messages as m
from hetpeer.dht.base.errors import ProtocolError, short_id
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import ChannelServer
from hetpeer.dht.streams.stream import Stream

if TYPE_CHECKING:
    from hetpeer.bootstrap.service.driver import CoordinatorService

SESSIONS = (0.2, 10.0)
"""Sessions of a peer, begun when it was forgotten or fenced: most per second, most at once after a pause."""
MESSAGES = (1000.0, 4000.0)
"""Messages of a peer: most per second, and most at once after a pause.

An honest peer sends about one for each slot, block and 2 MiB of a reduce: ten a second in tests/hostile.
"""
BYTES = (8e6, 64e6)
"""Bytes of a peer: most per second, and most at once after a pause.

The largest: evidence for a new coordinator, 1 to 10 kB a block and step; fingerprints, 4 KiB a block.
"""


class _Tokens:
    """A token bucket: `rate` tokens a second, at most `most`; taking more than are left makes others wait."""

    def __init__(self, rate: float, most: float, now: float) -> None:
        self._rate, self._most = rate, most
        self._left, self._at = most, now

    def _fill(self, now: float) -> None:
        self._left = min(self._left + max(now - self._at, 0.0) * self._rate, self._most)
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until one token is there."""
        self._fill(now)
        return max(0.0, 1.0 - self._left) / self._rate

    def take(self, amount: float) -> None:
        self._left -= amount

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self._left >= self._most


class RateLimit:
    """The limit of one peer, over all its channels. Times are seconds of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._sessions = _Tokens(*SESSIONS, now)
        self._messages = _Tokens(*MESSAGES, now)
        self._bytes = _Tokens(*BYTES, now)

    def wait(self, now: float, *, session: bool) -> float:
        """Seconds until the next message may be read. `session`: whether it begins a session."""
        due = max(self._messages.wait(now), self._bytes.wait(now))
        return max(due, self._sessions.wait(now)) if session else due

    def heard(self, nbytes: int, *, session: bool) -> None:
        """Note that a message of this many bytes was read."""
        self._messages.take(1.0)
        self._bytes.take(float(nbytes))
        if session:
            self._sessions.take(1.0)

    def is_rested(self, now: float) -> bool:
        """Whether the limit is fully restored, so that it can be forgotten."""
        return all(one.is_full(now) for one in (self._sessions, self._messages, self._bytes))


LOOK_S = 10.0
"""Seconds between two checks. A channel whose peer was not admitted at two checks in a row is closed."""
GIVEN_UP = 3
"""Checks with an admitted peer's stream broken until it is forgotten: its lease has run out by then."""
MAX_UNHEARD = 32 << 20
"""Most unacknowledged bytes to a volunteer: 100 times what one is sent while its stream is broken."""

_log = logging.getLogger(__name__)


class VolunteerSessions:
    """All sessions of one term."""

    def __init__(self, host: CoordinatorService, clock: Clock) -> None:
        self.host = host
        self._clock = clock
        self.inside: set[str] = set()
        """Peers that are admitted."""
        self._outside: set[str] = set()
        """Peers with a channel that were not admitted at the last check."""
        self._broken: Counter[str] = Counter()
        """Admitted peer with a broken stream → checks since then."""
        self._rate_limits: dict[str, RateLimit] = {}
        self._looked = clock.monotonic()
        self._channels = ChannelServer(self._accept, m.MAX_MESSAGE_BYTES, lanes=1)
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

    def look(self, now: float) -> None:
        """Every LOOK_S: forget peers that are gone, and close channels of peers that were not admitted."""
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
        self._rate_limits = {p: h for p, h in self._rate_limits.items() if p in here or not h.is_rested(now)}

    def _accept(self, peer: str, _key: str) -> _Session:
        return _Session(self, peer)

    async def in_turn(self, peer: str, message: m.Message, nbytes: int) -> None:
        """Return when a message of `peer` may be read."""
        session = isinstance(message, m.Hello)
        now = self._clock.monotonic()
        limit = self._rate_limits.get(peer) or self._rate_limits.setdefault(peer, RateLimit(now))
        if wait := limit.wait(now, session=session):
            await asyncio.sleep(wait)
        limit.heard(nbytes, session=session)

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
        self, _channel: Channel, _header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        """Pass a message on once the peer's rate limit allows. Raises `ProtocolError` if it is malformed."""
        data = await payload.receive_bytes(m.MAX_MESSAGE_BYTES)
        message = m.decode(data)
        if isinstance(message, m.Hello):
            if self._begun:
                raise ProtocolError("a session that begins twice", peer=self._peer)
            self._begun = True
        await self._sessions.in_turn(self._peer, message, len(data))
        self._sessions.host.received(self._peer, message)

    def beat(self, _channel: Channel) -> None:
        self._sessions.host.received(self._peer, m.Heartbeat())

    def up(self, _channel: Channel) -> None:
        self._sessions.resumed(self._peer)

    def down(self, channel: Channel) -> None:
        if not channel.closed:
            self._sessions.broken(self._peer)
