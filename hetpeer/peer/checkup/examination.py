"""All checks of `hetpeer doctor` in their order: quick ones first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from hetpeer.peer.arrival.invites import Destination
from hetpeer.peer.checkup import local_checks, network_checks
from hetpeer.peer.checkup.findings import Finding
from hetpeer.peer.checkup.local_checks import Owner, battery, idle, port, settings
from hetpeer.peer.checkup.thresholds import Verdict


async def examine(home: Path, goal: Destination | None) -> AsyncIterator[Finding]:
    """Yield each finding as soon as it is known. Writes nothing but a nameless probe file.

    `goal`: peers to meet as well. Takes a few seconds, mostly for the compute worker and for peers that do
    not answer.
    """
    owner = await asyncio.to_thread(Owner.of, home)
    checks: dict[str, Callable[[], Verdict]] = {
        "software": local_checks.software,
        "memory": local_checks.memory,
        "sharing": local_checks.shared_memory,
        "files": local_checks.open_files,
        "clock": local_checks.clock,
        "home": lambda: local_checks.folder(home),
        "identity": lambda: local_checks.identity(home),
        "daemon": lambda: local_checks.daemon(home),
        "service": local_checks.service,
        "settings": lambda: settings(owner),
        "port": lambda: port(owner),
        "idle": lambda: idle(owner),
        "battery": lambda: battery(owner),
    }
    for check, look in checks.items():
        yield await network_checks.judged(check, _at_once(look))
    yield await network_checks.judged("network", network_checks.network_process())
    if goal is None:
        yield Finding.skipped(
            "peers",
            "not checked: hetpeer doctor INVITE shows whether the run's peers answer and reach this machine",
        )
    else:
        async for finding in network_checks.meet(goal, owner.value("network.host"), owner.port):
            yield finding
    yield await network_checks.judged("device", network_checks.worker())


async def _at_once(look: Callable[[], Verdict]) -> Verdict:
    return look()
