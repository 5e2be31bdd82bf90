"""Keeping in touch: the peers to join by are dialled again when they are lost, and those met lately when p2pd was."""

from __future__ import annotations

from itertools import chain

from hetpeer.dht.addresses import Address, relay_in, socket_in
from hetpeer.dht.session import Session

MAX_REMEMBERED = 64
"""Peers whose addresses are kept in case p2pd dies."""


class Contacts:
    """`known` are the addresses to join by."""

    def __init__(self, known: list[Address]) -> None:
        self.known = known
        self._connected: set[str] = set()
        self._direct: set[str] = set()
        """Those of them to whom no relay leads."""
        self._met: dict[str, list[Address]] = {}

    async def tend(self, session: Session) -> None:
        """Note who is new, dial those to join by that are lost, and stay known to them. Raises `P2pdError`."""
        connections = await session.control.connections()
        self._connected = {peer for peer, _ in connections}
        before, self._direct = self._direct, {peer for peer, text in connections if not relay_in(text)}
        for peer_id in self._direct - before:
            self._note(peer_id, [a for a in await session.control.addresses_of(peer_id) if not a.relay])
        for peer_id, text in connections:
            # To ask p2pd for the others would make it dial relays, whether they are there or not.
            if peer_id not in self._direct and peer_id not in self._met and socket_in(text) is not None:
                self._note(peer_id, [Address(text=f"{text}/p2p/{peer_id}", peer_id=peer_id)])
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

    def _note(self, peer_id: str, addresses: list[Address]) -> None:
        """Where a new contact is found. The latest MAX_REMEMBERED are kept."""
        self._met.pop(peer_id, None)
        self._met[peer_id] = addresses
        if len(self._met) > MAX_REMEMBERED:
            del self._met[next(iter(self._met))]
