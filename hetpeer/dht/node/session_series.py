"""The sessions of one node, one after the other, each configured by the known addresses and relays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.identity.address_record import AddressRecord
from hetpeer.dht.identity.addresses import at_socket
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.kademlia.table import KnownKeys
from hetpeer.dht.node.contacts import Contacts
from hetpeer.dht.p2pd.listener import Listener
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.p2pd.p2pd_process import NodeConfig, p2pd_does_not_start
from hetpeer.dht.reach.connection_monitor import ConnectionMonitor
from hetpeer.dht.reach.dialback import ReachProbe
from hetpeer.dht.reach.reachability import ReachKind
from hetpeer.dht.reach.relay_slots import MAX_SLOTS, Offered, RelaySlots, stranger

ANNOUNCED_S = 120.0
"""Seconds until p2pd is started again, to announce the new address of a relay."""
RELAY_TRIES = 8
"""Starts of p2pd until it relays as configured."""
_RESTART_PAUSE_S = (0.0, 0.2, 0.5, 1.0, 2.0)

_log = logging.getLogger(__name__)


class SessionSeries:
    """Makes sessions. `config` is the user's own; p2pd's follows from what the node finds out."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        clock: Clock,
        listener: Listener,
        watch: ConnectionMonitor,
        keys: KnownKeys,
    ) -> None:
        self.contacts = Contacts(
            [a for a in config.peers if a.peer_id != identity.peer_id],
            identity,
            lambda: tuple(listener.reliable()),
        )
        self.reaching = ReachProbe(config, identity.peer_id, clock)
        self.contacts.learned = self.reaching.found_at
        self._config = config
        self._identity = identity
        self._clock = clock
        self._listener = listener
        self._watch = watch
        self._keys = keys
        self._port = config.port
        self._outdated_since: float | None = None
        """Time since which p2pd announces the former address of a relay."""
        self._use(config)

    async def first(self) -> NetworkSession:
        """Start, join, ask others to dial us, maybe restart p2pd, join the DHT. Raises as `Node.start`."""
        session = await self._p2pd()
        async with _whole(session):
            peer_ids = await session.join(self.contacts.known, alone_ok=self._config.alone_ok)
            if not await self._reconfigured(session):
                await self._complete(session, peer_ids, None)
                return session
            await session.close()
        return await self._again(None)

    async def next(self, previous: Any) -> NetworkSession:
        """A session after p2pd has died, with the records of its DHT node. Never gives up."""
        attempt = 0
        while True:
            await asyncio.sleep(_RESTART_PAUSE_S[min(attempt, len(_RESTART_PAUSE_S) - 1)])
            attempt += 1
            try:
                return await self._again(previous)
            except LocalError as error:
                _log.warning("p2pd could not be started again: %s", error)

    async def tend(self, session: NetworkSession) -> bool:
        """Keep contact; end p2pd, to be configured anew, if others find us otherwise. Raises `P2pdError`.

        Returns whether we have other addresses than at the last time.
        """
        await self.contacts.tend(session)
        if self._relays_outdated() or await self._reconfigured(session):
            _log.info(
                "the network process starts again, for what others find of us: %s", self.reaching.estimate
            )
            await session.p2pd.close()
        before, now = self.contacts.book.of(self._identity.peer_id), self._own_record(session)
        return before is not None and now is not before

    async def call_back(self, session: NetworkSession) -> None:
        """Dial everybody met lately, and tell them where we are. Never raises."""
        await self.contacts.call_back(session, self._own_record(session))

    def _own_record(self, session: NetworkSession) -> AddressRecord:
        """Our record with our present addresses, a forwarded one first."""
        there = self.reaching.forwarded(session.addresses)
        places = [*([there] if there else []), *session.addresses]
        return self.contacts.book.own(places, self._clock.wall())

    # ── one session ────────────────────────────────────────────────────────────────────────────────────────

    async def _again(self, previous: Any) -> NetworkSession:
        session = await self._p2pd()
        async with _whole(session):
            peer_ids = await session.rejoin(self.contacts.known)
            await self._complete(session, peer_ids, previous)
        return session

    async def _p2pd(self) -> NetworkSession:
        if self._config.reachability == "public":
            return await self._relaying()
        session = await self._started()
        session.gate = partial(self._gate, session.control)
        return session

    async def _gate(self, control: P2pdControl, peer_id: str) -> bool:
        """Wait for relays if those are needed, and connect to `peer_id`. Returns whether it may be there.

        Raises `P2pdError`.
        """
        if self._watch.slots is not None:
            await self._watch.slots.gate(control, peer_id)
        return await self.contacts.connect_if_listening(control, peer_id)

    async def _started(self) -> NetworkSession:
        self._outdated_since = None
        try:
            session = await NetworkSession.start(
                self._config, self._identity, self._clock, self._listener, self._keys, port=self._port
            )
        except P2pdError as error:
            raise p2pd_does_not_start(error.why) from error
        self._port = self._port or session.listening_port()
        return session

    async def _complete(self, session: NetworkSession, peer_ids: list[str], previous: Any) -> None:
        if self._watch.slots is not None:
            await self._watch.slots.refill(session.control)
        await session.start_dht(peer_ids, previous)

    async def _reconfigured(self, session: NetworkSession) -> bool:
        """Ask helpers if it is time, and adapt p2pd's configuration. Returns whether it has changed."""
        if self._config.reachability == "auto":
            return False
        slots = self._watch.slots
        served = self.reaching.estimate.reach is not ReachKind.PRIVATE or (slots is not None and slots.serve)
        await self.reaching.round(session, self._port, served=served)
        config = self.reaching.adapted(self._config, session, served=served)
        if config == self._config:
            self._keep_spare_slots()
            return False
        self._use(config)
        return True

    def _relays_outdated(self) -> bool:
        """Use the relays' present addresses. Returns whether p2pd has announced a former one for ANNOUNCED_S.

        Slots are taken at the new address at once. The announcement is less urgent, and changing it breaks
        all streams.
        """
        now, relays = self._clock.monotonic(), tuple(map(self.reaching.address_of, self._config.relays))
        if relays != self._config.relays:
            self._use(replace(self._config, relays=relays))
            self._outdated_since = self._outdated_since or now
        if self._outdated_since is None or now - self._outdated_since < ANNOUNCED_S:
            return False
        self._outdated_since = None
        return True

    def _use(self, config: NodeConfig) -> None:
        self._config = config
        private = config.reachability == "private"
        self._watch.use(RelaySlots(config.relays, self._clock, needed=True) if private else None)

    def _keep_spare_slots(self) -> None:
        """Keep relay slots for the peers that cannot connect to us although others can."""
        relays, slots = self.reaching.relays[:MAX_SLOTS], self._watch.slots
        if (
            self._config.reachability == "ask"
            and relays
            and (slots is None or [*slots.relays.values()] != relays)
        ):
            self._watch.use(RelaySlots(relays, self._clock, needed=False))

    # ── being a relay ──────────────────────────────────────────────────────────────────────────────────────

    async def _relaying(self) -> NetworkSession:
        """A session whose p2pd relays as configured, or the last of RELAY_TRIES."""
        for left in reversed(range(RELAY_TRIES)):
            # a new stranger each time: one does not redial a port soon after a failure
            async with stranger() as offered:
                session = await self._started()
                async with _whole(session):
                    if await self._relays(session, offered):
                        return session
                    if left:
                        await session.close()
        _log.warning(
            "this peer relays too little for peers that accept no connections: those cannot take part;"
            " start it again, or add another reliable peer"
        )
        return session

    async def _relays(self, session: NetworkSession, offered: Offered) -> bool:
        """Whether p2pd relays enough for others; true if a running p2pd cannot be tested."""
        host = self._config.host
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound to
        try:
            offer = await offered(at_socket(here, self._port, self._identity.peer_id))
        except (LocalError, RemoteError) as error:
            _log.info("the relay could not be tested: %s", error)
            return not session.p2pd.exited.is_set()
        if not offer.useful:
            _log.info("p2pd relays %d bytes to a circuit only: it is started again", offer.max_bytes)
        return offer.useful


@asynccontextmanager
async def _whole(session: NetworkSession) -> AsyncIterator[None]:
    """Close the session if the block fails; a `P2pdError` becomes `LocalError` HP-NET-003."""
    try:
        yield
    except P2pdError as error:
        await session.close()
        raise p2pd_does_not_start(error.why) from error
    except BaseException:
        await session.close()
        raise
