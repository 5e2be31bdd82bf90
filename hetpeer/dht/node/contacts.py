"""Keeping in touch: the peers to join by are dialled again when they are lost, and those met lately when p2pd was."""

from __future__ import annotations

import asyncio
from itertools import chain

from hetpeer.dht.identity.addresses import Address, relay_in, socket_in
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError

MAX_REMEMBERED = 64
"""Peers whose addresses are kept in case p2pd dies."""
MAX_ASKED = 16
"""New ones for whose addresses p2pd is asked at a time; it looks far and wide for one that has hung up already."""


class Contacts:
    """`known` are the addresses to join by."""

    def __init__(self, known: list[Address]) -> None:
        self.known = known
        self._connected: set[str] = set()
        self._asked: set[str] = set()
        """Those of them to whom no relay leads, and for whose addresses p2pd was asked."""
        self._met: dict[str, list[Address]] = {}

    async def tend(self, session: NetworkSession) -> None:
        """Note who is new, dial those to join by that are lost, and stay known to them.

        Raises `P2pdError` when p2pd does not say who is connected.
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
            # To ask p2pd for the others would make it dial relays, whether they are there or not.
            if peer_id not in direct and peer_id not in self._met and socket_in(text) is not None:
                self._note(peer_id, [Address(text=f"{text}/p2p/{peer_id}", peer_id=peer_id)])
        back = await session.rejoin([a for a in self.known if a.peer_id not in self._connected])
        # One that was away for a moment since the last time may have forgotten us.
        for address in self.known:
            if address.peer_id in self._connected or address.peer_id in back:
                await session.ping(address.peer_id)

    async def call_back(self, session: NetworkSession) -> None:
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


async def _listens_at(control: P2pdControl, peer_id: str) -> list[Address] | None:
    """Where a peer that was connected a moment ago listens; None if p2pd does not know it any more."""
    try:
        return [address for address in await control.addresses_of(peer_id) if not address.relay]
    except P2pdError:
        return None
