"""One process of a swarm, as the tests see it: what it says, how it is hurt, when it is gone.

Nothing waits for a fixed time: every wait is for a condition and has a deadline.
"""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from hetpeer.dht.identity.peer_identity import Identity
from tests.swarm.forkserver import ForkServer
from tests.swarm.spare import NAME

T = TypeVar("T")
POLL_S = 0.05
BUSY_S = 60.0
"""What takes seconds where nothing else runs is waited for so long."""
LEAVE_S = 30.0
"""What a daemon may take to end after a signal: several times what it gives itself."""


async def until(condition: Callable[[], T], what: str | Callable[[], str], within_s: float = BUSY_S) -> T:
    """The first true value of `condition`; `what` is told if there is none in time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (value := condition()):
        if asyncio.get_running_loop().time() >= deadline:
            pytest.fail(f"not within {within_s} s: {what if isinstance(what, str) else what()}")
        await asyncio.sleep(POLL_S)
    return value


@dataclass
class Child:
    """One `hetpeer` process in a session of its own."""

    name: str
    pid: int
    home: Path
    out: Path
    err: Path
    server: ForkServer

    @property
    def status(self) -> int | None:
        return self.server.status(self.pid)

    @property
    def said(self) -> str:
        """Everything on stderr so far."""
        return self.err.read_text(errors="replace") if self.err.exists() else ""

    @property
    def printed(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def shown(self) -> dict[str, Any]:
        """The last whole line of JSON that it printed, as `hetpeer status --watch --json` does; empty
        before.
        """
        line = self.printed.rpartition("\n")[0].rpartition("\n")[2]
        shown: dict[str, Any] = json.loads(line or "{}")
        return shown

    @property
    def peer_id(self) -> str:
        return Identity.load(self.home / "identity.key").peer_id

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def fill_disk(self, log: Path) -> None:
        """From now on it may write into no file beyond the size of its `log`: the disk is full."""
        size = log.stat().st_size  # its last words fit: what it says on stderr is shorter
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def free_disk(self) -> None:
        """Undo `fill_disk`."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def helpers(self) -> dict[str, psutil.Process]:
        """Its own children: `p2pd` and `worker`, as far as they run."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):  # it, or one of them, has just ended
            for process in filter(runs, psutil.Process(self.pid).children()):
                line = " ".join(process.cmdline())
                is_worker = process.name() == NAME or "worker_main" in line
                found["worker" if is_worker else "p2pd" if "p2pd" in line else line] = process
        return found

    async def blocks(self) -> tuple[int, int]:
        """First and last block of the place that it says it has; it says so at its next look."""
        place = re.compile(r"blocks (\d)-(\d)")
        found = await until(lambda: place.search(self.said), f"{self.name} says its blocks")
        assert found is not None
        return int(found[1]), int(found[2])

    def address(self) -> str:
        """Where its p2pd listens."""
        listening = [
            c for c in self.helpers()["p2pd"].net_connections("tcp") if c.status == psutil.CONN_LISTEN
        ]
        return f"/ip4/127.0.0.1/tcp/{listening[0].laddr.port}/p2p/{self.peer_id}"

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone, and with it its p2pd and its worker."""
        helpers = self.helpers().values()
        assert helpers
        self.signal(signal.SIGKILL)
        await self.ended()
        await over(helpers, f"the helpers of {self.name} are gone")

    async def ended(self, within_s: float = BUSY_S) -> int:
        """Its exit status."""
        await until(
            lambda: self.status is not None, lambda: f"{self.name} ends; it said:\n{self.said}", within_s
        )
        assert self.status is not None
        return self.status

    async def says(self, text: str, within_s: float = BUSY_S) -> None:
        await until(lambda: text in self.said, f"{self.name} says {text!r}", within_s)


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended, or been killed."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def over(processes: Iterable[psutil.Process], what: str) -> None:
    """Return when none of `processes` runs any more, and their ports are free."""
    ending = list(processes)
    await until(lambda: not any(map(runs, ending)), what)
