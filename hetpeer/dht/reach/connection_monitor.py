"""The eye on p2pd's connections: what path leads to whom, our slots at relays, and shorter ways where there are any."""

from __future__ import annotations

import logging
from ipaddress import ip_address
from weakref import WeakSet

from hetpeer.dht.base.clock import Clock
from hetpeer.dht.base.task_set import TaskSet
from hetpeer.dht.identity.addresses import Address, relay_in, socket_in, through
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.p2pd.tcp_probe import is_peer
from hetpeer.dht.reach.peer_paths import PeerPaths
from hetpeer.dht.reach.relay_slots import RelaySlots
from hetpeer.dht.reach.relayed_streams import RelayedStreams
from hetpeer.dht.streams.stream import Stream

SHORTEN_S = (0.0, 15.0, 60.0, 600.0)
"""Between the attempts to reach a peer without the relay; the last one for ever."""
OBSERVERS = 4
"""libp2p punches holes once so many peers of the internet have told it the same address (as the other side must know)."""
MAX_KNOCKS = 8
"""Addresses that a peer may have us try: they are what it says."""
_KNOCK_S = 2.0
_CONNECT_S = 5.0

_log = logging.getLogger(__name__)


class ConnectionMonitor:
    """Looks at the connections of one p2pd after the other. `slots` is None where no relay is known, or we are one."""

    def __init__(self, peer_id: str, clock: Clock) -> None:
        self.paths = PeerPaths()
        self.slots: RelaySlots | None = None
        self.resumable: set[str] = set()
        """Protocols whose streams are opened again by whoever opened them: they may be cut for a better path."""
        self._detours = RelayedStreams()
        self._peer_id = peer_id
        self._clock = clock
        self._long: WeakSet[Stream] = WeakSet()
        """Our streams that may be led through a relay."""
        self._tries: dict[str, tuple[int, float]] = {}
        """Relayed peer → (how often it was tried to reach it directly, when to try next)."""
        self._tasks = TaskSet()

    @property
    def period_s(self) -> float:
        """How often to look: a slot that is lost must be taken again before anybody misses it."""
        return 0.5 if self.slots is not None and self.slots.needed else 2.0

    @property
    def relays(self) -> list[str]:
        """The peers through which we are reached, where we accept no connections ourselves."""
        return self.slots.held if self.slots is not None and self.slots.needed else []

    def use(self, slots: RelaySlots | None) -> None:
        """These are the slots from now on."""
        if self.slots is not None:
            self._tasks.spawn(self.slots.close(), name="end of the slots before")
        self.slots = slots

    async def look(self, control: P2pdControl) -> None:
        """Take in the connections that there are now, and act on them. Raises `P2pdError`."""
        connections = await control.connections()
        before = {relay: self.paths.through(relay) for relay in (self.slots.relays if self.slots else ())}
        for peer in self.paths.update(connections):
            _log.info("%s is reached directly now", peer)
            self._cut(peer)
        self._detours.reached(self.paths.direct)
        if self.slots is not None:
            self.slots.tend(control, {peer for peer, _ in connections}, dict(before))
        observed = len({peer for peer, text in connections if _observes(text)}) >= OBSERVERS
        now, before_tries = self._clock.monotonic(), self._tries
        self._tries = {peer: before_tries.get(peer, (0, now)) for peer in self.paths.relayed}
        for peer, (count, due) in self._tries.items():
            if now >= due:
                self._tries[peer] = count + 1, now + SHORTEN_S[min(count + 1, len(SHORTEN_S) - 1)]
                punches = observed and count > 0 and self._peer_id < peer  # one of the two, and not too early
                self._tasks.spawn(
                    self._shorten(control, peer, punches=punches), name=f"shorter way to {peer}"
                )

    async def open(self, control: P2pdControl, peer_id: str, protocol: str, timeout_s: float) -> Stream:
        """A new stream, through a relay where there is no other way. Raises `PeerLostError` after `timeout_s` at the latest."""
        relays = self.slots.relays.values() if self.slots is not None else ()
        stream = await self._detours.open(control, peer_id, protocol, timeout_s, relays)
        path = self.paths.of(peer_id)
        if protocol in self.resumable and (path is None or path.relay):
            self._long.add(stream)  # to be cut when a shorter path than its own is there
        return stream

    async def close(self) -> None:
        await self._tasks.close()
        if self.slots is not None:
            await self.slots.close()

    def _cut(self, peer: str) -> None:
        for stream in list(self._long):
            if stream.peer_id == peer:
                self._long.discard(stream)
                stream.abort()

    async def _shorten(self, control: P2pdControl, peer: str, *, punches: bool) -> None:
        """Who is reached through a relay may be open to us: whoever dialled first could not come in. libp2p does not
        dial a peer that it is connected to, so the relayed connection goes, once it is proved that a direct one works.

        Otherwise a hole is punched, if `punches`: libp2p tries that only where a relayed connection has just come in.
        """
        path = self.paths.of(peer)
        try:
            for address in (await control.addresses_of(peer))[:MAX_KNOCKS]:
                if not address.relay and await _answers(address):
                    await control.disconnect(peer)
                    await control.connect(address, _CONNECT_S)
                    return
            relay = self.slots.relays.get(path.relay) if punches and self.slots and path else None
            if relay is not None:
                await control.disconnect(peer)
                await control.connect(through(relay, peer), _CONNECT_S)
        except P2pdError as error:
            _log.debug("no shorter way to %s: %s", peer, error)


def _observes(text: str) -> bool:
    """Whether the other end of a connection sees us from the internet."""
    place = socket_in(text)
    return place is not None and not relay_in(text) and ip_address(place[0]).is_global


async def _answers(address: Address) -> bool:
    place = address.socket
    return place is not None and await is_peer(*place, address.peer_id, _KNOCK_S)
