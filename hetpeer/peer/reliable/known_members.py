"""Addresses of the volunteers that work in the run, as far as a reliable peer knows them.

They are kept in the run directory. A reliable peer that comes back, perhaps at another address, calls them:
they cannot know where it is, but it knows where they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hetpeer.bootstrap.consensus.replica import Replica
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.discovery import Roster
from hetpeer.dht.node.node import Node
from hetpeer.peer.arrival.destinations import Destination, known_run, remember, remember_seen
from hetpeer.peer.arrival.find_run import acquaintances

LOOK_S = 1.0
"""Seconds between two looks for volunteers that work and are not known yet."""
RENEW_S = 30.0
"""Seconds between two looks at everybody's addresses."""

_log = logging.getLogger(__name__)


class KnownMembers:
    """The members of `run` that have worked for it; `service` is the coordinator's while this peer leads."""

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        replica: Replica,
        service: Callable[[], CoordinatorService | None],
    ) -> None:
        self._node = node
        self._run = run
        self._replica = replica
        self._service = service
        self._roster = Roster(node, run.run_id)
        self._seen: set[str] = set()
        """Working volunteers whose adverts were read."""

    async def call_and_keep(self) -> None:
        """Call the members that were known at the last start, and keep the present ones. Never returns."""
        known = known_run(self._run.path, Destination((), self._run.run_id))
        if known is not None:
            await self._node.call(known.destination.addresses)
        due = 0.0
        while True:
            now = asyncio.get_running_loop().time()
            service = self._service()
            working = set(service.core.working()) if service is not None else set()
            if now >= due or working - self._seen:
                due = now + RENEW_S
                try:
                    await self._keep(working)
                except RemoteError as error:
                    _log.debug("who is there: %s", error)
                except LocalError as error:  # there may be room the next time
                    _log.warning("%s", error.line())
            await asyncio.sleep(LOOK_S)

    async def _keep(self, working: set[str]) -> None:
        """Write down where members listen. Raises `RemoteError`, `LocalError` HP-DISK-*."""
        company = self._replica.company()
        members = {*working, *self._replica.credit.of, *company}
        adverts = {peer: advert for peer, advert in (await self._roster.read()).items() if peer in members}
        adverts.pop(self._node.peer_id, None)
        self._seen = working.intersection(adverts)
        seen = acquaintances(adverts, company)
        run, folder = self._run.run_id, self._run.path
        if known_run(folder, Destination((), run)) is None:
            await asyncio.to_thread(remember, folder, run, ())
        await asyncio.to_thread(remember_seen, folder, run, seen)
