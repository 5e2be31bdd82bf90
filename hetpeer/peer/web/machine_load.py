"""Load of the machine, and hetpeer's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoad:
    """Load between two looks."""

    cpu: float
    """Share of all cores that is busy, since the last look."""
    own_cores: float
    """Cores that the daemon and its children keep busy, since the last look."""
    memory_used: int
    """Bytes; as the next four."""
    memory_total: int
    own_memory: int
    """Resident, of the daemon and its children; pages that they share count for each."""
    disk_free: int
    """Free bytes of the disk with the daemon's home."""


class LoadMeter:
    """Measures the load; `home` is the daemon's folder, `pid` its process (default: this one).

    Raises `psutil.Error` if the process has ended.
    """

    def __init__(self, home: Path, pid: int | None = None) -> None:
        self._home = home
        self._me = psutil.Process(pid)
        self._family: dict[int, psutil.Process] = {self._me.pid: self._me}
        """Processes by pid; kept, because psutil measures from one look at a process to the next."""
        self.look()

    def look(self) -> MachineLoad:
        """The load since the last call. Takes a few milliseconds."""
        memory = psutil.virtual_memory()
        cores = resident = 0.0
        for process in self._relatives():
            try:
                cores += process.cpu_percent() / 100
                resident += process.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
        return MachineLoad(
            cpu=psutil.cpu_percent() / 100,
            own_cores=cores,
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            own_memory=int(resident),
            disk_free=psutil.disk_usage(str(self._home)).free,
        )

    def _relatives(self) -> list[psutil.Process]:
        now = [self._me, *self._me.children(recursive=True)]
        self._family = {process.pid: self._family.get(process.pid, process) for process in now}
        return list(self._family.values())
