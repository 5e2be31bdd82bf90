"""What a daemon serves over HTTP, of a volunteer and of a reliable peer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from hetpeer.peer.progress import say
from hetpeer.peer.ranking import fetch_ranking
from hetpeer.peer.web.app import application
from hetpeer.peer.web.metrics import metrics_route
from hetpeer.peer.web.serving import served
from hetpeer.peer.web.sources import (
    RELIABLE_STATES,
    VOLUNTEER_STATES,
    DaemonSource,
    ReliableSource,
    VolunteerSource,
)

if TYPE_CHECKING:
    from hetpeer.bootstrap.rundir import RunDirectory
    from hetpeer.dht.node import Node
    from hetpeer.peer.preparing import RunFiles
    from hetpeer.peer.reliable import ReliablePeer
    from hetpeer.peer.volunteer import Volunteer

CREDIT_S = 30.0
"""Between two questions for our own."""
RETRY_S = 3.0
"""While we do not know it at all."""

Where = tuple[str, int]
"""Host and port; port 0: a free one."""


@contextlib.asynccontextmanager
async def volunteer_served(
    where: Where, node: Node, files: RunFiles, home: Path, volunteer: Callable[[], Volunteer | None]
) -> AsyncIterator[None]:
    """While the context is open. `volunteer`: the one that lives now. Raises `LocalError` HP-WEB-001."""
    daemon = DaemonSource(node, "volunteer", files.run.manifest.name, home, VOLUNTEER_STATES)
    own = _OwnCredit(node, lambda: files.council.peers)
    async with _metrics(where, VolunteerSource(daemon, volunteer, lambda: own.credit).metrics):
        asking = asyncio.ensure_future(own.ask_forever())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@contextlib.asynccontextmanager
async def reliable_served(
    where: Where, node: Node, run: RunDirectory, peer: ReliablePeer
) -> AsyncIterator[None]:
    """As `volunteer_served`."""
    manifest = run.manifest
    daemon = DaemonSource(node, "reliable", manifest.name, run.path, RELIABLE_STATES)
    source = ReliableSource(daemon, peer, manifest.training.steps, grouped=manifest.averaging is not None)
    async with _metrics(where, source.metrics):
        yield


@contextlib.asynccontextmanager
async def _metrics(where: Where, look: Callable[[], Iterable[Metric]]) -> AsyncIterator[None]:
    host, port = where
    async with served(application([metrics_route(look)], host), host, port) as url:
        say(f"metrics at {url}/metrics")
        yield


class _OwnCredit:
    """What this peer has, as one of `reliable` said last."""

    def __init__(self, node: Node, reliable: Callable[[], Iterable[str]]) -> None:
        self._node = node
        self._reliable = reliable
        self.credit: int | None = None

    async def ask_forever(self) -> None:
        """Every half minute; who does not answer leaves it as it was."""
        while True:
            found = await fetch_ranking(self._node, self._reliable(), self._node.peer_id)
            if found is not None and found.yours is not None:
                self.credit = found.yours.credit
            await asyncio.sleep(RETRY_S if self.credit is None else CREDIT_S)
