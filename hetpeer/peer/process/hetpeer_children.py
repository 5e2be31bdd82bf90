"""Child processes that run hetpeer: those of the demo, and a reliable peer's stand-in. Each has its own log
file.

`end_all` stops them in order. If this process is killed, the kernel kills them, and they their own children
(p2pd, compute worker).
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.base.runtime import dying_with_us

END_S = 6.0
"""Seconds from SIGTERM to SIGKILL. A volunteer leaves in at most 4 s."""
COMMAND = (sys.executable, "-P", "-m", "hetpeer.peer.cli.main")


class Child:
    """One `hetpeer` process, started by `start` and ended by `end_all`."""

    def __init__(self, name: str, log: Path, process: Process) -> None:
        self.name = name
        self._log = log
        self._process = process

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], *, home: Path, log: Path, command: Sequence[str] = COMMAND
    ) -> Child:
        """Run `hetpeer *arguments` in home `home`; stderr is appended to `log`. For the main thread only."""
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                *arguments,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=stderr,
                env=os.environ
                | {
                    "HETPEER_HOME": str(home),
                    "HETPEER_DASHBOARD": "off",  # one machine, many daemons
                    # The child imports what we import, installed or not.
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
                preexec_fn=dying_with_us(),
                start_new_session=True,  # Ctrl-C in the terminal is for the demo, which decides what it means
            )
        return cls(name, log, process)

    @property
    def status(self) -> int | None:
        """The exit status, minus the signal that killed it, or None while it runs."""
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    async def next_line(self, timeout_s: float) -> str:
        """The next line of its standard output. Raises `LocalError` HP-DEMO-003 at the end or a timeout."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
                if not line:
                    await self._process.wait()
        except TimeoutError:
            raise self.failure(f"it was not ready within {timeout_s:.0f} s") from None
        if not line:
            raise self.failure()
        return line.decode(errors="replace").strip()

    async def kill(self) -> None:
        """SIGKILL, as a power cut would. Returns when the process is gone."""
        self._process.kill()
        await self._process.wait()

    async def end(self, within_s: float) -> None:
        """Send SIGTERM; after `within_s`, or if cancelled, SIGKILL. Returns when the process has ended."""
        if self.status is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        except asyncio.CancelledError:
            self._process.kill()
            raise

    async def finished(self, within_s: float) -> int:
        """The exit status. Raises `LocalError` HP-DEMO-003 when it does not end by itself."""
        try:
            async with asyncio.timeout(within_s):
                return await self._process.wait()
        except TimeoutError:
            raise self.failure(f"it has not ended {within_s:.0f} s after the run") from None

    def failure(self, why: str = "") -> LocalError:
        """HP-DEMO-003 with the process's own last line."""
        how = why or f"it ended with status {self.status}"
        return LocalError(
            "HP-DEMO-003",
            f"{self.name} failed",
            why=f"{how}; its last line: {self.last_line()}",
            fix=f"read {self._log}",
        )

    def last_line(self) -> str:
        """The last line of its stderr."""
        return next(iter(self.last_lines(1)), "nothing")

    def last_lines(self, count: int) -> list[str]:
        """The last `count` lines of its stderr, without empty ones."""
        lines = (line.strip() for line in self._log.read_text(errors="replace").split("\n"))
        return [line for line in lines if line][-count:]


async def end_all(children: Iterable[Child]) -> None:
    """End all children at once, within about END_S."""
    await asyncio.gather(*(child.end(END_S) for child in children))
