"""Main memory of a swarm's volunteers while they work: the proportional set size of each process.

Of a page that several processes share (libraries, the arena of daemon and worker) each has its part, so the
sizes of a volunteer's processes add up to what it takes (`man 5 proc_pid_smaps`, smaps_rollup).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.swarm import Swarm

EVERY_S = 2.0
"""A look at a worker with a quarter of GPT-2 takes 5 to 25 ms of a processor, which the swarm lacks."""
KINDS = {"volunteer": "daemon", "worker": "worker", "volunteer p2pd": "p2pd"}
MIB = 2**20


@dataclass(slots=True)
class VolunteerMemory:
    """Largest sizes of one volunteer so far, in bytes."""

    largest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS.values(), 0))
    """Largest size of each process."""
    together: dict[str, int] = field(default_factory=dict)
    """Sizes of all processes at the moment at which their sum was largest."""
    looks: int = 0

    def look(self, parts: dict[str, psutil.Process]) -> None:
        """Read the processes now; one that ends meanwhile has nothing."""
        now: dict[str, int] = {}
        for kind, process in parts.items():
            with suppress(psutil.NoSuchProcess):
                now[KINDS[kind]] = process.memory_full_info().pss
        self.looks += 1
        for kind, nbytes in now.items():
            self.largest[kind] = max(self.largest[kind], nbytes)
        if sum(now.values()) > self.all:
            self.together = now

    @property
    def all(self) -> int:
        """Largest sum."""
        return sum(self.together.values())

    def figures(self) -> dict[str, Any]:
        """In MiB."""
        return {
            "largest_mib": {kind: round(nbytes / MIB, 1) for kind, nbytes in self.largest.items()},
            "together_mib": {kind: round(nbytes / MIB, 1) for kind, nbytes in self.together.items()},
            "all_mib": round(self.all / MIB, 1),
            "looks": self.looks,
        }


class MemoryWatch:
    """Looks at all volunteers every EVERY_S seconds until it is cancelled."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.volunteers: dict[int, VolunteerMemory] = {}

    async def watch(self) -> None:
        while True:
            for number in list(self._swarm.volunteers):
                memory = self.volunteers.setdefault(number, VolunteerMemory())
                # The kernel walks all pages of a process for its figure: the log is read meanwhile.
                await asyncio.to_thread(memory.look, self._swarm.parts(number))
            await asyncio.sleep(EVERY_S)
