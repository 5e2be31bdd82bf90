"""How much memory is missing where no plan fits. Pure."""

from __future__ import annotations

from dataclasses import replace

from hetpeer.stages.planning.swarms.given import Devices, Work
from hetpeer.stages.planning.swarms.search import Search

HALVINGS = 12


def lacking(devices: Devices, work: Work, device: int) -> float:
    """Bytes more on `device` with which a beginning of the search fits; all blocks on it alone are enough."""
    low, high = 0.0, float((work.memory + work.kept).sum() + 4 * work.crossing.max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        memory = devices.memory.copy()
        memory[device] += middle
        if Search(replace(devices, memory=memory), work, seed=0).run(lambda: False) is None:
            low = middle
        else:
            high = middle
    return high
