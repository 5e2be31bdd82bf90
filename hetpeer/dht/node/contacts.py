"""The peers that a node knows: those to join by, those met lately, and where sought peers listen by now.

Lost peers to join by are dialled again. After a restart of p2pd everybody met lately is dialled, and told
where we are. A sought peer (one to join by, or a reliable one of the run) that cannot be reached is looked
for: its newest signed record is asked of other peers (dht/reach/whereabouts.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import chain

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.identity.address_record import AddressBook, AddressRecord
from hetpeer.dht.identity.addresses import Address, relay_in, socket_in
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia.first_contact import CONNECT_DEADLINE_S
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.p2pd.tcp_probe import is_peer, listens
from hetpeer.dht.reach.whereabouts import ask

MAX_REMEMBERED = 64
"""Peers whose addresses are kept in case p2pd dies."""
MAX_ASKED = 16
"""New peers whose addresses p2pd is asked for at a time; it searches the network for one that has hung up."""
KNOCK_S = 2.0
"""Seconds that a peer's port has to accept a TCP connection before p2pd dials it."""
MEMBERS_ASKED = 8
"""Peers that are asked where a lost one is, drawn anew each time."""
SEARCHES_S = (*(2.0,) * 15, 15.0)
"""Seconds after each search for lost peers; the last value repeats."""
FORGET_S = 30.0
"""Seconds after the last try to reach a lost peer until it is not looked for any more."""
ANSWER_S = 3.0
"""Seconds that a peer has to prove at an address that it is the one that is looked for."""
TELL_TRIES, TELL_PAUSE_S = 4, 0.4
"""Dials of a peer that closes our former connections after each one."""

_log = logging.getLogger(__name__)


class Contacts:
    """Contacts of one node. `known`: addresses to join by; `reliable`: the run's reliable peers."""

    def __init__(
        self,
        known: list[Address],
        identity: Identity,
        reliable: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.known = known
        self.book = AddressBook(identity, self._sought)
        self.learned: Callable[[AddressRecord], None] = _ignored
        """Called with each newer record of a sought peer."""
        self.missed = asyncio.Event()
        """Set while a sought peer is lost."""
        self._peer_id = identity.peer_id
        self._reliable = reliable
        self._lost: dict[str, float] = {}
        """Lost peer → time of the last try to reach it."""
        self._connected: set[str] = set()
        self._asked: set[str] = set()
        """Directly connected peers whose addresses p2pd was asked for."""
        self._met: dict[str, list[Address]] = {}

    async def tend(self, session: NetworkSession) -> None:
        """Note new peers, redial lost ones to join by, stay known to them in the DHT. Raises `P2pdError`."""
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
        await self._learn_of(session, self._sought().intersection(new))
        joining = {address.peer_id for address in self.known}
        lost = joining - self._connected
        back = await session.rejoin(chain.from_iterable(map(self._known_places, lost)))
        # A peer that was away for a moment may have forgotten us.
        for peer_id in joining:
            if peer_id in self._connected or peer_id in back:
                await session.ping(peer_id)

    async def connect_if_listening(self, control: P2pdControl, peer_id: str) -> bool:
        """Connect to `peer_id` where a port of it answers. Returns False if none of those that we know does.

        libp2p waits longer after each failed dial (6, 9, 14, 21, 30 s …), so it is not asked to dial while
        nothing listens. Then a peer that was away is found within a try of its return. Raises `P2pdError`.
        """
        places = self._places(peer_id)
        if not places or await control.connected_lately(peer_id):
            return True
        found = await asyncio.gather(*(listens(*place.socket, KNOCK_S) for place in places if place.socket))
        there = [place for place, answers in zip(places, found, strict=True) if answers]
        for place in there:
            with suppress(P2pdError):
                await control.connect(place, CONNECT_DEADLINE_S)
                break
        return bool(there)

    def _places(self, peer_id: str) -> list[Address]:
        """The direct addresses that we know of `peer_id`: its newest record's and those to join by first."""
        places = dict.fromkeys((*self._known_places(peer_id), *self._met.get(peer_id, ())))
        return [place for place in places if not place.relay and place.socket is not None]

    def _known_places(self, peer_id: str) -> list[Address]:
        """Addresses of its newest record, then those to join by."""
        record = self.book.of(peer_id)
        named = (address for address in self.known if address.peer_id == peer_id)
        return [*dict.fromkeys((*(record.addresses if record else ()), *named))]

    def meet(self, addresses: Iterable[Address]) -> None:
        """Note `addresses` of peers that were met before this start."""
        for address in addresses:
            if address.peer_id != self._peer_id:
                self._note(address.peer_id, [*self._met.get(address.peer_id, ()), address])

    async def call_back(self, session: NetworkSession, own: AddressRecord) -> None:
        """Dial everybody met lately and tell `own`, our record. Never raises.

        libp2p's dial back-off keeps them from us for 5 s, and they may have connections to an address that we
        have no more.
        """

        async def call(peer_id: str) -> None:
            for _ in range(TELL_TRIES):
                if not await session.rejoin(self._places(peer_id)):
                    return
                with suppress(RemoteError):
                    records, again = await ask(session.control, peer_id, own)
                    self.learn(*records)
                    if not again:
                        break
                await asyncio.sleep(TELL_PAUSE_S)
            await session.ping(peer_id)

        await asyncio.gather(*map(call, self._met))

    def _note(self, peer_id: str, addresses: list[Address]) -> None:
        """Remember a contact's addresses. The latest MAX_REMEMBERED are kept."""
        self._met.pop(peer_id, None)
        self._met[peer_id] = addresses
        if len(self._met) > MAX_REMEMBERED:
            del self._met[next(iter(self._met))]

    # ── sought peers ───────────────────────────────────────────────────────────────────────────────────────

    def _sought(self) -> set[str]:
        """Peers to join by, and the run's reliable peers."""
        return {*(address.peer_id for address in self.known), *self._reliable()} - {self._peer_id}

    def miss(self, peer_id: str) -> None:
        """`peer_id` does not answer: if it is sought, it is lost until `found`."""
        if peer_id in self._sought():
            self._lost[peer_id] = asyncio.get_running_loop().time()
            self.missed.set()

    def found(self, peer_id: str) -> None:
        """`peer_id` has answered."""
        self._lost.pop(peer_id, None)
        if not self._lost:
            self.missed.clear()

    async def search(self, session: NetworkSession) -> None:
        """Ask connected peers and those met lately where lost ones are, and connect to those that are found.

        Raises `P2pdError`.
        """
        connections = await session.control.connections()
        now = asyncio.get_running_loop().time()
        for peer_id, tried_at in list(self._lost.items()):
            if now - tried_at > FORGET_S:
                self.found(peer_id)
                continue
            others = sorted({*dict(connections), *self._met} - {peer_id})
            asked = random.sample(others, min(len(others), MEMBERS_ASKED))
            before = self.book.of(peer_id)
            await asyncio.gather(*(self._ask(session.control, other, [peer_id]) for other in asked))
            record = self.book.of(peer_id)
            remote = [socket_in(text) for peer, text in connections if peer == peer_id]
            if record is None:
                continue
            if not remote or (record is not before and _leads_elsewhere(remote, record)):
                await self._reconnect(session.control, record)

    async def _reconnect(self, control: P2pdControl, record: AddressRecord) -> None:
        """End all connections to the peer of `record`, and connect where it proves that it is there.

        Raises `P2pdError`.
        """
        for place in record.addresses:
            if place.socket is None or not await is_peer(*place.socket, record.peer_id, ANSWER_S):
                continue
            _log.info("%s is found at another address", record.peer_id)
            await control.disconnect(record.peer_id)
            await control.connect(place, CONNECT_DEADLINE_S)
            return

    async def _learn_of(self, session: NetworkSession, peers: Collection[str]) -> None:
        """Ask newly connected sought peers for their own records, so that others can ask us. Never raises."""
        await asyncio.gather(*(self._ask(session.control, peer, [peer]) for peer in peers))

    async def _ask(self, control: P2pdControl, other: str, peers: list[str]) -> None:
        with suppress(RemoteError):
            records, _ = await ask(control, other, of=peers)
            self.learn(*records)

    def learn(self, *records: AddressRecord) -> None:
        """Keep newer records of sought peers."""
        for record in records:
            if self.book.learn(record):
                self.learned(record)


def _leads_elsewhere(remote: Iterable[tuple[str, int] | None], record: AddressRecord) -> bool:
    """Whether no connection leads to an address of `record`, by the `remote` ends of all."""
    ips = {place.socket[0] for place in record.addresses if place.socket is not None}
    return ips.isdisjoint(end[0] for end in remote if end is not None)


def _ignored(_record: AddressRecord) -> None:
    """Ignore a record."""


async def _listens_at(control: P2pdControl, peer_id: str) -> list[Address] | None:
    """Direct addresses of a recently connected peer; None if p2pd no longer knows it."""
    try:
        return [address for address in await control.addresses_of(peer_id) if not address.relay]
    except P2pdError:
        return None
