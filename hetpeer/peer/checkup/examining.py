"""The examination in its order: what is quick and needs nothing first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from hetpeer.peer.arrival.invites import Destination
from hetpeer.peer.checkup import here, meeting
from hetpeer.peer.checkup.findings import Finding
from hetpeer.peer.checkup.judging import Verdict
from hetpeer.peer.checkup.owner import Owner, battery, idle, port, settings


async def examine(home: Path, goal: Destination | None) -> AsyncIterator[Finding]:
    """Each finding as soon as it is there. Nothing stays behind, and nothing is written but a probe without a name.

    `goal`: the peers to meet as well. Takes a few seconds, most of them for the compute worker and for peers that do not answer.
    """
    owner = await asyncio.to_thread(Owner.of, home)
    checks: dict[str, Callable[[], Verdict]] = {
        "software": here.software,
        "memory": here.memory,
        "sharing": here.shared_memory,
        "files": here.open_files,
        "clock": here.clock,
        "home": lambda: here.folder(home),
        "identity": lambda: here.identity(home),
        "daemon": lambda: here.daemon(home),
        "service": here.service,
        "settings": lambda: settings(owner),
        "port": lambda: port(owner),
        "idle": lambda: idle(owner),
        "battery": lambda: battery(owner),
    }
    for check, look in checks.items():
        yield await meeting.judged(check, _at_once(look))
    yield await meeting.judged("network", meeting.network_process())
    if goal is None:
        yield Finding.skipped(
            "peers",
            "no peer was named: hetpeer doctor --bootstrap ADDR asks whether it answers, and dials back",
        )
    else:
        async for finding in meeting.meet(goal, owner.value("network.host"), owner.port):
            yield finding
    yield await meeting.judged("device", meeting.worker())


async def _at_once(look: Callable[[], Verdict]) -> Verdict:
    return look()
