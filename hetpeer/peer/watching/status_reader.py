"""Reading of a swarm's status through any peer: run, peers, blocks, holders, progress, credit, moves, curves.

A short-lived node with a new identity joins the DHT, fetches the signed manifest from the peer it joined by,
and reads all adverts; the coordinator need not answer. Adverts are claims, so a status proves nothing;
`hetpeer audit` does. Credit, moves and curves come from the run's log (`FromLog`): the reliable peers are
asked for them, and a reliable peer asks itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetpeer.bootstrap.log.loss_curves import Curves
from hetpeer.dht.node.node import Node
from hetpeer.peer.watching.log_questions import FromLog
from hetpeer.peer.watching.status_summary import LogFigures, present, summarise
from hetpeer.peer.watching.swarm_status import (
    SwarmStatus,
)

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.manifest import SignedManifest
    from hetpeer.dht.discovery import Advert, Roster, TaskBoard
    from hetpeer.peer.arrival.destinations import Destination

MAX_CLAIMANTS = 8
"""Most peers asked for an amendment because they claim to coordinate."""


@dataclass(slots=True)
class Onlooker:
    """A reader of a swarm that takes no part in it."""

    signed: SignedManifest
    _node: Node
    _roster: Roster
    _board: TaskBoard
    _log: FromLog
    _identity: str
    """The peer whose credit is asked for as well."""
    _present: Sequence[str] = ()
    """Reliable peers that were there at the last look, the coordinator first."""
    _told: LogFigures | None = None
    """The newest figures that were fetched."""

    async def adverts(self) -> Mapping[str, Advert]:
        """Current adverts by peer id. Raises `RemoteError` HP-NET-012 if the DHT does not answer."""
        return present(await self._roster.read())

    async def leaves_per_hour(self) -> Mapping[str, float]:
        """Expected departures an hour by peer id, from a reliable peer; empty if not known. Never raises."""
        told = await self._log.departures(self.signed.reliable)
        return {} if told is None else told.hourly

    async def status(self, *, ranked: bool = True) -> SwarmStatus:
        """Current status; unless `ranked`, with the last known figures of the log.

        Raises as `adverts`.
        """
        from hetpeer.dht.base.runtime import SystemClock
        from hetpeer.peer.arrival.manifest_fetch import amended

        found, board = await asyncio.gather(self._roster.read(), self._board.read())
        adverts = present(found)
        claimants = {peer for peer, advert in adverts.items() if advert.role == "coordinator"}
        if claimants.isdisjoint(self.signed.reliable):
            self.signed = await amended(self._node, self.signed, sorted(claimants)[:MAX_CLAIMANTS])
        self._present = sorted(
            adverts.keys() & set(self.signed.reliable), key=lambda peer: peer not in claimants
        )
        if ranked:
            self._told = LogFigures(
                *await asyncio.gather(
                    self._log.ranking(self._present, self._identity),
                    self._log.moves(self._present),
                    self._log.departures(self._present),
                    self._log.plan(self._present),
                )
            )
        return summarise(self.signed, found, SystemClock().wall(), board, self._told)

    async def curves(self) -> Curves | None:
        """The run's loss curves, from a reliable peer seen at the last look. Never raises."""
        return await self._log.curves(self._present)


@asynccontextmanager
async def observing(goal: Destination, peer: str = "") -> AsyncIterator[Onlooker]:
    """Join the swarm as an onlooker; the credit of `peer` is asked for as well.

    Raises `LocalError` HP-NET-002 (no peer answers), HP-NET-006 (no peer serves the run), HP-RUN-016.
    """
    from hetpeer.bootstrap.run.durable_files import temporary_folder
    from hetpeer.dht.discovery import Roster, TaskBoard
    from hetpeer.dht.identity.peer_identity import Identity
    from hetpeer.dht.node.node import Node, NodeConfig
    from hetpeer.peer.arrival.manifest_fetch import fetch_manifest

    with temporary_folder("status") as folder:
        identity = Identity.create(folder / "identity.key")
        node = await Node.start(NodeConfig(peers=goal.addresses), identity)
        try:
            signed = (await fetch_manifest(node, goal.addresses, goal.run)).signed
            roster, board = Roster(node, signed.run_id), TaskBoard(node, signed.run_id)
            yield Onlooker(signed, node, roster, board, FromLog(node), peer)
        finally:
            await node.close()
