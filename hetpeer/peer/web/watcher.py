"""Watcher: a dashboard of a swarm without taking part."""

from __future__ import annotations

import asyncio

from hetpeer.bootstrap.run.durable_files import temporary_folder
from hetpeer.peer.arrival.invites import Destination
from hetpeer.peer.limits.settings import Where
from hetpeer.peer.process.lifecycle import unless
from hetpeer.peer.watching.status_reader import observing


async def watch(goal: Destination, where: Where, leaving: asyncio.Event) -> None:
    """Serve the dashboard until `leaving` is set. Raises `LocalError` as `observing`, and HP-WEB-001."""
    await unless(leaving.wait(), _watch(goal, where))


async def _watch(goal: Destination, where: Where) -> None:
    from hetpeer.peer.web.daemon_web import watcher_served

    with temporary_folder("watcher") as folder:
        async with observing(goal) as onlooker, watcher_served(where, onlooker, folder):
            await asyncio.Event().wait()  # until we are cancelled
