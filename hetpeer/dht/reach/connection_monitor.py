"""Watching p2pd's connections: paths to peers, our relay slots, and streams through relays where needed.

Two peers may be unable to connect although others reach both (a filter, a broken route). So each peer keeps
slots at relays (relay_slots.py), and a peer that cannot connect to another tries the relays that it knows.
Relayed connections are replaced by direct ones when that becomes possible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from ipaddress import ip_address
from weakref import WeakSet

from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.base.runtime import Clock, TaskSet
from hetpeer.dht.identity.addresses import Address, relay_in, socket_in, through
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.p2pd.tcp_probe import is_peer
from hetpeer.dht.reach.reachability import PeerPaths
from hetpeer.dht.reach.relay_slots import RelaySlots
from hetpeer.dht.streams.stream import Stream

SHORTEN_S = (0.0, 15.0, 30.0, 45.0)
"""Seconds between attempts to reach a relayed peer directly; the last value repeats. So a pair that was too
busy for a direct connection has one within a minute of that.
"""
PUNCH_S = 600.0
"""Seconds between attempts to punch a hole, for which the relayed connection is closed each time."""
OBSERVERS = 4
"""Internet peers that told libp2p the same address before it punches holes; the other side needs it too."""
MAX_KNOCKS = 8
"""Addresses tried of one peer: they are only its claims."""
KNOCK_S = (2.0, 4.0, 8.0)
"""Seconds that a peer's port has to answer, by attempt: a busy machine takes seconds for a handshake."""
_CONNECT_S = 5.0

HEAD_START_S = 1.5
"""Seconds for the direct attempt alone: a possible connection takes less, also between continents."""

_log = logging.getLogger(__name__)


class ConnectionMonitor:
    """Watches the connections of successive p2pds. `slots` is None if no relay is known, or we are one."""

    def __init__(self, peer_id: str, clock: Clock) -> None:
        self.paths = PeerPaths()
        self.slots: RelaySlots | None = None
        self.resumable: set[str] = set()
        """Protocols whose streams may be cut for a better path: the side that opened them reopens them."""
        self._relay_needed: set[str] = set()
        """Peers to which no direct stream could be opened, but one through a relay."""
        self._peer_id = peer_id
        self._clock = clock
        self._long: WeakSet[Stream] = WeakSet()
        """Our streams that may lead through a relay."""
        self._tries: dict[str, tuple[int, float]] = {}
        """Relayed peer → (attempts to reach it directly, time of the next one)."""
        self._punched_at: dict[str, float] = {}
        """Relayed peer → time of the last attempt to punch a hole."""
        self._tasks = TaskSet()

    @property
    def period_s(self) -> float:
        """Seconds between looks: a lost slot must be taken again before anybody misses it."""
        return 0.5 if self.slots is not None and self.slots.needed else 2.0

    @property
    def relays(self) -> list[str]:
        """The relays through which we are reached; empty if we accept connections ourselves."""
        return self.slots.held if self.slots is not None and self.slots.needed else []

    def use(self, slots: RelaySlots | None) -> None:
        """Replace the relay slots."""
        if self.slots is not None:
            self._tasks.spawn(self.slots.close(), name="end of the slots before")
        self.slots = slots

    async def look(self, control: P2pdControl) -> None:
        """Read the present connections from p2pd and act on changes. Raises `P2pdError`."""
        connections = await control.connections()
        before = {relay: self.paths.through(relay) for relay in (self.slots.relays if self.slots else ())}
        for peer in self.paths.update(connections):
            _log.info("%s is reached directly now", peer)
            self._cut(peer)
        self._relay_needed.difference_update(self.paths.direct)
        if self.slots is not None:
            self.slots.tend(control, {peer for peer, _ in connections}, dict(before))
        observed = len({peer for peer, text in connections if _observes(text)}) >= OBSERVERS
        now, before_tries = self._clock.monotonic(), self._tries
        self._tries = {peer: before_tries.get(peer, (0, now)) for peer in self.paths.relayed}
        for peer, (count, due) in self._tries.items():
            if now >= due:
                self._tries[peer] = count + 1, now + SHORTEN_S[min(count + 1, len(SHORTEN_S) - 1)]
                # one of the two peers, and not too early
                punches = observed and count > 0 and self._peer_id < peer and self._may_punch(peer, now)
                knock_s = KNOCK_S[min(count, len(KNOCK_S) - 1)]
                self._tasks.spawn(
                    self._shorten(control, peer, knock_s, punches=punches), name=f"shorter way to {peer}"
                )

    async def open(
        self, control: P2pdControl, peer_id: str, protocol: str, timeout_s: float, *, there: bool
    ) -> Stream:
        """A new stream, relayed if there is no other way. Raises `PeerLostError` within `timeout_s`.

        `there`: whether a direct dial makes sense; otherwise only relays are tried.
        """
        relays = self.slots.relays.values() if self.slots is not None else ()
        if there:
            stream = await self._open(control, peer_id, protocol, timeout_s, relays)
        else:
            deadline = asyncio.get_running_loop().time() + timeout_s
            if not await self._go_round(control, peer_id, relays, deadline):
                raise PeerLostError(peer_id, "nothing listens at its addresses")
            stream = await control.open_stream(peer_id, protocol, _until(deadline))
        path = self.paths.of(peer_id)
        if protocol in self.resumable and (path is None or path.relay):
            self._long.add(stream)  # to be cut when there is a shorter path
        return stream

    async def close(self) -> None:
        """Cancel the attempts under way and give up the slots."""
        await self._tasks.close()
        if self.slots is not None:
            await self.slots.close()

    async def _open(
        self, control: P2pdControl, peer_id: str, protocol: str, timeout_s: float, relays: Iterable[Address]
    ) -> Stream:
        """A new stream, direct or through one of `relays`. Raises `PeerLostError` within `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        direct = asyncio.ensure_future(control.open_stream(peer_id, protocol, timeout_s))
        try:
            await asyncio.wait([direct], timeout=0 if peer_id in self._relay_needed else HEAD_START_S)
            opened = direct.done() and direct.exception() is None
            if opened or not await self._go_round(control, peer_id, relays, deadline):
                return await direct
            stream = await control.open_stream(peer_id, protocol, _until(deadline))
        except BaseException:
            _drop(direct)
            raise
        else:
            _drop(direct)
            return stream
        finally:
            del direct  # else its exception, which refers to this frame, would keep both alive

    async def _go_round(
        self, control: P2pdControl, peer_id: str, relays: Iterable[Address], deadline: float
    ) -> bool:
        """Connect to an unconnected peer through a relay; whether that made a connection."""
        for relay in relays:
            left_s = _until(deadline)
            if relay.peer_id == peer_id or not left_s:
                continue
            try:
                if peer_id in {peer for peer, _ in await control.connections()}:
                    return False
                await control.connect(through(relay, peer_id), min(_CONNECT_S, left_s))
            except P2pdError as error:
                _log.debug("%s is not reached through %s: %s", peer_id, relay.peer_id, error)
                continue
            self._relay_needed.add(peer_id)
            _log.info("%s is reached through the relay %s", peer_id, relay.peer_id)
            return True
        return False

    def _cut(self, peer: str) -> None:
        for stream in list(self._long):
            if stream.peer_id == peer:
                self._long.discard(stream)
                stream.abort()

    def _may_punch(self, peer: str, now: float) -> bool:
        """Whether the last attempt to punch a hole to `peer` is long ago; notes this one if so."""
        self._punched_at = {one: at for one, at in self._punched_at.items() if one in self._tries}
        if now - self._punched_at.get(peer, -PUNCH_S) < PUNCH_S:
            return False
        self._punched_at[peer] = now
        return True

    async def _shorten(self, control: P2pdControl, peer: str, knock_s: float, *, punches: bool) -> None:
        """Replace a relayed connection by a direct one if the peer's port answers.

        The peer that dialled first may have been unreachable while we can reach the other. libp2p does not
        dial a connected peer, so the relayed connection is closed once a direct one is proved possible. Else,
        with `punches`, a hole is punched: libp2p tries that only when a relayed connection has just come in.
        """
        path = self.paths.of(peer)
        try:
            own = [address for address in await control.addresses_of(peer) if not address.relay]
            for address in own[:MAX_KNOCKS]:
                if await _answers(address, knock_s):
                    await control.disconnect(peer)
                    await control.connect(address, _CONNECT_S)
                    return
            self.paths.explain(peer, "no answer" if own else "no address")
            relay = self.slots.relays.get(path.relay) if punches and self.slots and path else None
            if relay is not None:
                await control.disconnect(peer)
                await control.connect(through(relay, peer), _CONNECT_S)
        except P2pdError as error:
            _log.debug("no shorter way to %s: %s", peer, error)


def _observes(text: str) -> bool:
    """Whether the remote end of a connection sees us from the internet."""
    place = socket_in(text)
    return place is not None and not relay_in(text) and ip_address(place[0]).is_global


async def _answers(address: Address, within_s: float) -> bool:
    place = address.socket
    return place is not None and await is_peer(*place, address.peer_id, within_s)


def _until(deadline: float) -> float:
    """Seconds that are left; 0 if none."""
    return max(0.0, deadline - asyncio.get_running_loop().time())


def _drop(opening: asyncio.Future[Stream]) -> None:
    """Close a stream that nobody waits for any more, once it is open."""

    def end(opening: asyncio.Future[Stream]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().abort()

    opening.cancel()
    opening.add_done_callback(end)
