"""Keeping contact: redial lost peers to join by, and after a restart of p2pd the peers met lately."""

from __future__ import annotations

import asyncio
from itertools import chain

from hetpeer.dht.identity.addresses import Address, relay_in, socket_in
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError

MAX_REMEMBERED = 64
"""Peers whose addresses are kept in case p2pd dies."""
MAX_ASKED = 16
"""New peers whose addresses p2pd is asked for at a time; it searches the network for one that has hung up."""


class Contacts:
    """Contacts of one node. `known` are the addresses to join by."""

    def __init__(self, known: list[Address]) -> None:
        self.known = known
        self._connected: set[str] = set()
        self._asked: set[str] = set()
        """Directly connected peers whose addresses p2pd was asked for."""
        self._met: dict[str, list[Address]] = {}

    async def tend(self, session: NetworkSession) -> None:
        """Note new peers, redial lost ones to join by, and stay known to them in the DHT.

        Raises `P2pdError` if p2pd does not list the connections.
        """
        connections = await session.control.connections()
        self._connected = {peer for peer, _ in connections}
        direct = {peer for peer, text in connections if not relay_in(text)}
        new = list(direct - self._asked)[:MAX_ASKED]
        self._asked = (self._asked & direct).union(new)
        for peer_id, addresses in zip(
            new, await asyncio.gather(*(_listens_at(session.control, peer) for peer in new)), strict=True
        ):
            if addresses is not None:
                self._note(peer_id, addresses)
        for peer_id, text in connections:
            # Asking p2pd for the others would make it dial relays, whether they are there or not.
            if peer_id not in direct and peer_id not in self._met and socket_in(text) is not None:
                self._note(peer_id, [Address(text=f"{text}/p2p/{peer_id}", peer_id=peer_id)])
        back = await session.rejoin([a for a in self.known if a.peer_id not in self._connected])
        # A peer that was away for a moment may have forgotten us.
        for address in self.known:
            if address.peer_id in self._connected or address.peer_id in back:
                await session.ping(address.peer_id)

    async def call_back(self, session: NetworkSession) -> None:
        """Dial everybody met lately; never raises.

        Peers that tried to reach us while p2pd was away would not try again for 5 s (libp2p's dial back-off).
        """
        for peer_id in await session.rejoin(list(chain.from_iterable(self._met.values()))):
            await session.ping(peer_id)

    def _note(self, peer_id: str, addresses: list[Address]) -> None:
        """Remember a contact's addresses. The latest MAX_REMEMBERED are kept."""
        self._met.pop(peer_id, None)
        self._met[peer_id] = addresses
        if len(self._met) > MAX_REMEMBERED:
            del self._met[next(iter(self._met))]


async def _listens_at(control: P2pdControl, peer_id: str) -> list[Address] | None:
    """Where a recently connected peer listens; None if p2pd no longer knows it."""
    try:
        return [address for address in await control.addresses_of(peer_id) if not address.relay]
    except P2pdError:
        return None
