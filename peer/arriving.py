"""Into the network of a run: a node that is in touch with those we join by, and the run's manifest.

Who was reached from this home before is waited for: a coordinator is started again, a line comes back. Whom nobody here
ever reached is most likely a wrong address, and that is said at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from hetpeer.bootstrap.manifest import SignedManifest
from hetpeer.bootstrap.service import CONTROL
from hetpeer.dht.addresses import Address
from hetpeer.dht.errors import LocalError
from hetpeer.dht.node import Node, NodeConfig
from hetpeer.dht.tasks import TaskSet
from hetpeer.peer.home import Home
from hetpeer.peer.known import remember, remembered
from hetpeer.peer.link import TENSORS
from hetpeer.peer.manifests import fetch_manifest
from hetpeer.peer.reach import tell_forever

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
AWAY = frozenset({"HP-NET-002", "HP-NET-006"})
"""Nobody answers there, or nobody who serves a run."""

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def arrived(config: NodeConfig, home: Home) -> AsyncIterator[tuple[Node, SignedManifest]]:
    """A node that has joined by `config.peers`, and the manifest they serve; the node is closed at the end.

    Raises `LocalError` as `Node.start` and `fetch_manifest` do; HP-NET-002 and HP-NET-006 only where none of the peers was
    reached from this home before. Else it waits for them until cancelled.
    """
    pause = FIRST_PAUSE_S
    async with contextlib.AsyncExitStack() as stack:
        while True:
            try:
                found = await _arrive(config, home, stack)
                break
            except LocalError as error:
                if error.code not in AWAY or not _known(home.path, config.peers):
                    raise
                _log.warning(
                    "%s: %s; they were there before, so again in %.0f s", error.what, error.why, pause
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        remember(home.path, config.peers)
        yield found


async def _arrive(
    config: NodeConfig, home: Home, stack: contextlib.AsyncExitStack
) -> tuple[Node, SignedManifest]:
    async with contextlib.AsyncExitStack() as attempt:
        node = await attempt.enter_async_context(_running(config, home))
        signed = await fetch_manifest(node, config.peers)
        stack.push_async_exit(attempt.pop_all())
    return node, signed


@contextlib.asynccontextmanager
async def _running(config: NodeConfig, home: Home) -> AsyncIterator[Node]:
    node = await Node.start(config, home.identity())
    node.may_cut(CONTROL, TENSORS)
    telling = TaskSet()
    telling.spawn(tell_forever(node, reliable=False), name="words on reachability")
    try:
        yield node
    finally:
        await telling.close()
        await node.close()


def _known(home: Path, peers: Sequence[Address]) -> bool:
    return not set(map(str, peers)).isdisjoint(remembered(home))
