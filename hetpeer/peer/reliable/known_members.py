"""Addresses of the volunteers that work in the run, as far as a reliable peer knows them.

They are kept in the run directory. A reliable peer that comes back, perhaps at another address, calls them:
they cannot know where it is, but it knows where they are. A few that take connections stand in its invites.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from hetpeer.bootstrap.consensus.replica import Replica
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.tcp_probe import is_peer
from hetpeer.dht.reach.reachability import ReachKind
from hetpeer.peer.arrival.destinations import (
    Destination,
    known_run,
    remember,
    remember_seen,
    worth_giving,
)
from hetpeer.peer.arrival.find_run import acquaintances
from hetpeer.peer.arrival.invite_file import carried_members
from hetpeer.peer.arrival.manifest_fetch import advertised_places
from hetpeer.peer.reliable.invited_members import InvitedMembers, is_as_public

LOOK_S = 1.0
"""Seconds between two looks for volunteers that work and are not known yet; the pause doubles for those whose
adverts are not found.
"""
ANSWER_S = 4.0
"""Seconds that a member has to prove its identity at an address of its advert."""
RENEW_S = 30.0
"""Seconds between two looks at everybody's addresses."""

_log = logging.getLogger(__name__)


class KnownMembers:
    """The members of `run` that have worked for it; `service` is the coordinator's while this peer leads.

    `others`: addresses in its invites that are no members'.
    """

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        replica: Replica,
        service: Callable[[], CoordinatorService | None],
        others: Sequence[Address],
    ) -> None:
        self._node = node
        self._run = run
        self._replica = replica
        self._service = service
        self._roster = Roster(node, run.run_id)
        self.adverts: Mapping[str, Advert] = {}
        """Adverts of all others at the last look."""
        self._seen: set[str] = set()
        """Working volunteers whose adverts were read."""
        carried = carried_members(run, node.peer_id, others)
        self.invited = InvitedMembers(carried, asyncio.get_running_loop().time())
        """Members whose addresses an invite carries."""

    async def call_and_keep(self, ready: asyncio.Event) -> None:
        """Call the members that were known at the last start; once `ready`, keep the present ones. Never
        returns.
        """
        known = known_run(self._run.path, Destination((), self._run.run_id))
        if known is not None:
            self._node.call_others(known.destination.addresses)
        await ready.wait()  # before that the disk may have no room
        due, pause_s, looked_for = 0.0, LOOK_S, set[str]()
        while True:
            now = asyncio.get_running_loop().time()
            service = self._service()
            working = set(service.core.working()) if service is not None else set()
            missing = working - self._seen
            if missing - looked_for:
                due, pause_s = now, LOOK_S
            if now >= due:
                looked_for = missing
                due, pause_s = now + (pause_s if missing else RENEW_S), min(2 * pause_s, RENEW_S)
                try:
                    await self._keep(working)
                except RemoteError as error:
                    _log.debug("who is there: %s", error)
                except LocalError as error:  # the log, in the same folder, says it to people
                    _log.debug("addresses of members are not kept: %s", error.line())
            await asyncio.sleep(LOOK_S)

    async def _keep(self, working: set[str]) -> None:
        """Write down where members listen. Raises `RemoteError`, `LocalError` HP-DISK-*."""
        company = self._replica.company()
        members = {*working, *self._replica.credit.of, *company}
        self.adverts = {p: a for p, a in (await self._roster.read()).items() if p != self._node.peer_id}
        adverts = {peer: advert for peer, advert in self.adverts.items() if peer in members}
        self._seen = working.intersection(adverts)
        seen = acquaintances(adverts, company)
        run, folder = self._run.run_id, self._run.path
        if known_run(folder, Destination((), run)) is None:
            await asyncio.to_thread(remember, folder, run, ())
        await asyncio.to_thread(remember_seen, folder, run, seen)
        await self._prove({peer: advert for peer, advert in adverts.items() if peer not in company})

    async def _prove(self, adverts: Mapping[str, Advert]) -> None:
        """Note which members answer where they say that they take connections: only those are given away."""
        own = worth_giving(map(parse_address, self._node.addresses()))
        places = {
            peer: places[0]
            for peer, advert in adverts.items()
            if advert.reach == ReachKind.PUBLIC
            and (places := worth_giving(advertised_places(peer, advert)))
            and is_as_public(own, places[0])
        }
        now = asyncio.get_running_loop().time()
        asked = self.invited.candidates(places, now)
        found = await asyncio.gather(*(_answers(place) for place in asked.values()))
        there = {peer: place for (peer, place), yes in zip(asked.items(), found, strict=True) if yes}
        self.invited.proved(there, now)


async def _answers(place: Address) -> bool:
    """Whether the peer of `place` itself takes connections there."""
    return place.socket is not None and await is_peer(*place.socket, place.peer_id, ANSWER_S)
