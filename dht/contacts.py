"""Keeping in touch: the peers to join by are dialled again when they are lost, and those met lately when p2pd was."""

from __future__ import annotations

from itertools import chain

from hetpeer.dht.addresses import Address, relay_in
from hetpeer.dht.session import Session

MAX_REMEMBERED = 64
"""Peers whose addresses are kept in case p2pd dies."""


class Contacts:
    """`known` are the addresses to join by."""

    def __init__(self, known: list[Address]) -> None:
        self.known = known
        self._connected: set[str] = set()
        self._met: dict[str, list[Address]] = {}

    async def tend(self, session: Session) -> None:
        """Note who is new, dial those to join by that are lost, and stay known to them. Raises `P2pdError`."""
        connections = await session.control.connections()
        before, self._connected = self._connected, {peer for peer, _ in connections}
        # To look for others would make p2pd dial relays, whether they are there or not.
        for peer_id in {peer for peer, text in connections if not relay_in(text)} - before:
            await self._remember(session, peer_id)
        back = await session.rejoin([a for a in self.known if a.peer_id not in self._connected])
        # One that was away for a moment since the last time may have forgotten us.
        for address in self.known:
            if address.peer_id in self._connected or address.peer_id in back:
                await session.ping(address.peer_id)

    async def call_back(self, session: Session) -> None:
        """Dial everybody met lately; never raises. Peers that tried to reach us while p2pd was away would not try again
        for 5 s (libp2p's dial back-off), unless we call them.
        """
        for peer_id in await session.rejoin(list(chain.from_iterable(self._met.values()))):
            await session.ping(peer_id)

    async def _remember(self, session: Session, peer_id: str) -> None:
        """Note where a new contact listens. The latest MAX_REMEMBERED are kept."""
        self._met.pop(peer_id, None)
        self._met[peer_id] = [a for a in await session.control.addresses_of(peer_id) if not a.relay]
        if len(self._met) > MAX_REMEMBERED:
            del self._met[next(iter(self._met))]
