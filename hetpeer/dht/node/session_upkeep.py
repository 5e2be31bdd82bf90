"""Jobs that a node repeats as long as it lives: it checks that p2pd is alive and its connections reach
somebody, looks for lost peers, and sends unwanted guests of its relay away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.identity.addresses import socket_in
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.node.contacts import SEARCHES_S
from hetpeer.dht.node.own_line import LINE_LOOK_S, OwnLine, machine_addresses, talks_from
from hetpeer.dht.node.relay_guard import RelayGuard
from hetpeer.dht.node.session_series import SessionSeries
from hetpeer.dht.p2pd import silent_connections
from hetpeer.dht.p2pd.listener import Listener
from hetpeer.dht.p2pd.p2pd_control import P2pdError
from hetpeer.dht.p2pd.silent_connections import SilentConnections
from hetpeer.dht.reach.connection_monitor import ConnectionMonitor

TEND_PERIOD_S = 5.0
"""Seconds between checks that p2pd is alive, and redials of lost peers."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionUpkeep:
    """Endless jobs of one node; each takes the session that runs when it looks."""

    own_id: str
    session: Callable[[], Awaitable[NetworkSession]]
    """The running session, once there is one."""
    sessions: SessionSeries
    monitor: ConnectionMonitor
    listener: Listener
    relay_guard: RelayGuard
    clock: Clock
    listens_for_all: bool
    """Whether this peer is one that others must be able to reach."""
    call_others: Callable[[], None]
    renew: Callable[[], Awaitable[None]]
    """Restart p2pd."""

    def jobs(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Name → what runs until it is cancelled."""
        jobs = {
            "peer tender": self._tend(),
            "look at connections": self._monitor_connections(),
            "end silent connections": self._end_silent_connections(),
            "search for lost peers": self._search_forever(),
            "own addresses": self._watch_line(),
        }
        return jobs | ({"guests of the relay": self._guard_relay()} if self.listens_for_all else {})

    async def _tend(self) -> None:
        """Check that p2pd is alive, kill it if not, and keep contact with known peers."""
        silent = 0
        while True:
            await asyncio.sleep(TEND_PERIOD_S)
            session = await self.session()
            try:
                await session.refresh_addresses()
                if await self.sessions.tend(session) and self.listens_for_all:
                    self.call_others()
            except P2pdError as error:
                silent += 1
                _log.debug("p2pd %d did not answer: %s", session.p2pd.pid, error)
                if silent >= 2:
                    session.p2pd.kill()
                continue
            except Exception:  # noqa: BLE001 - a hanging p2pd would go unnoticed if this task ended
                _log.exception("contact with known peers was not kept this time")
            silent = 0

    async def _monitor_connections(self) -> None:
        """Pass p2pd's connections to the monitor again and again, `period_s` apart."""
        while True:
            session = await self.session()
            with suppress(P2pdError):
                await self.monitor.look(session.control)
            await asyncio.sleep(self.monitor.period_s)

    async def _end_silent_connections(self) -> None:
        """Look at p2pd's sockets again and again; end connections of nobody known if they are too many."""
        watched: tuple[NetworkSession, SilentConnections] | None = None
        while True:
            await asyncio.sleep(silent_connections.LOOK_S)
            session = await self.session()
            if watched is None or watched[0] is not session:
                watched = session, SilentConnections(session.p2pd.pid)
            silent = watched[1]
            if not await asyncio.to_thread(silent.too_many):
                continue
            ends: set[tuple[str, int]] | None = None
            with suppress(P2pdError, TimeoutError):
                async with asyncio.timeout(silent_connections.LOOK_S):
                    texts = [text for _, text in await session.control.connections()]
                ends = {end for text in texts if (end := socket_in(text)) is not None}
            await asyncio.to_thread(silent.end_surplus, session.listening_port(), ends)

    async def _guard_relay(self) -> None:
        """Send guests of our relay away that have no business here. Never returns."""
        while True:
            await asyncio.sleep(TEND_PERIOD_S)
            session = await self.session()
            with suppress(P2pdError):
                await self.relay_guard.look(session.control)

    async def _search_forever(self) -> None:
        """Look for sought peers while they are lost. Never returns."""
        contacts = self.sessions.contacts
        while True:
            await contacts.missed.wait()
            pauses = iter(SEARCHES_S)
            while contacts.missed.is_set():
                session = await self.session()
                with suppress(P2pdError):
                    await contacts.search(session)
                await asyncio.sleep(next(pauses, SEARCHES_S[-1]))

    async def _watch_line(self) -> None:
        """Restart p2pd when its connections are dead: this peer has another address. Never returns."""
        line, counted = OwnLine(silence_counts=self.listens_for_all), self.listener.throttle.down
        while True:
            left = line.left(machine_addresses())
            session = await self.session()
            streams = len(self.listener.peers - {self.own_id})
            silent = line.silent(self.clock.monotonic(), counted.nbytes, streams)
            if left and (gone := talks_from(session.p2pd.pid, left)):
                _log.warning("this machine does not have the address %s any more: connecting anew", gone)
                await self.renew()
            elif silent:
                _log.warning("nobody is heard any more: connecting anew, perhaps from another address")
                await self.renew()
            await asyncio.sleep(LINE_LOOK_S)
