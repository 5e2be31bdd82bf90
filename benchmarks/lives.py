"""Lives of a swarm's processes, sample by sample: memory, descriptors and threads of each, for as long as
it lived.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

from benchmarks.swarm import Swarm


@dataclass(slots=True)
class Life:
    """One process. `private_mib`: of its memory what no file and no arena is behind."""

    kind: str
    times: list[float] = field(default_factory=list)
    """Seconds of the monotonic clock."""
    steps: list[int] = field(default_factory=list)
    """That were committed by then."""
    rss_mib: list[float] = field(default_factory=list)
    private_mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


class Watch:
    """Samples every process of the swarm."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.lives: dict[int, Life] = {}

    def sample(self) -> None:
        step = self._swarm.feed.history.version
        for kind, processes in self._swarm.processes().items():
            for process in processes:
                try:
                    memory, files, threads = (
                        process.memory_info(),
                        process.num_fds(),
                        process.num_threads(),
                    )
                except psutil.Error:
                    continue  # it was killed a moment ago
                life = self.lives.setdefault(process.pid, Life(kind))
                life.times.append(time.monotonic())
                life.steps.append(step)
                life.rss_mib.append(memory.rss / 2**20)
                life.private_mib.append((memory.rss - memory.shared) / 2**20)
                life.files.append(files)
                life.threads.append(threads)


def slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Of the line through `values` at `places` by least squares, in units of a value per unit of a place."""
    return float(np.polyfit(places, values, 1)[0])
