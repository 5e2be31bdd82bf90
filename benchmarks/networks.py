"""The networks in which swarms of a few are measured: homes, a city, regions of the world, and slow homes.

Node 0 is where the bootstrap is, the others the volunteers: four, or more.
"""

from __future__ import annotations

import json
from typing import Any

from tests.wanlab.lab import MATRICES

FAR = ("oregon", "tokyo", "london", "seoul", "frankfurt", "virginia", "ohio", "ireland")
"""DT-FM's eight regions. Whoever takes which stage, the pipeline crosses the world, at 17 to 21 Mbit/s."""
VOLUNTEERS = 4
"""Volunteers that homes and city have by themselves."""
BESIDE_MS = 10.0
"""From a volunteer to the one whose like it is."""
ALIKE = {"slow": (5.0, 50.0, 20.0), "gigabit": (1000.0, 1000.0, 0.5)}
"""Volunteers that are alike: Mbit/s up and down, and milliseconds to each other, one way."""


def network(name: str, volunteers: int = VOLUNTEERS) -> dict[str, Any]:
    """Arguments of Lab: `homes`, `city`, `regions` (at most seven volunteers), `slow` or `gigabit`.

    A fifth has a line like the first's, and so on.
    """
    if name in ALIKE:
        return _alike(volunteers, *ALIKE[name])
    matrix: dict[str, Any] = json.loads((MATRICES / f"{name}.json").read_text())
    if name == "regions":
        return _picked(matrix, [matrix["names"].index(region) for region in FAR[: volunteers + 1]])
    return _picked(matrix, [0, *(number % VOLUNTEERS + 1 for number in range(volunteers))])


def _alike(volunteers: int, up: float, down: float, latency_ms: float) -> dict[str, Any]:
    nodes = volunteers + 1
    return {
        "nodes": nodes,
        "names": ["bootstrap", *map(str, range(1, nodes))],
        "latency_ms": [[latency_ms * (one != other) for other in range(nodes)] for one in range(nodes)],
        "uplink_mbps": [1000.0] + [up] * volunteers,
        "downlink_mbps": [1000.0] + [down] * volunteers,
        "queue_ms": 150,
    }


def _picked(matrix: dict[str, Any], at: list[int]) -> dict[str, Any]:
    """The nodes `at` these places of the matrix, some of them more than once where only latencies are of
    pairs.
    """

    def table(rows: list[list[float]]) -> list[list[float]]:
        ends = list(enumerate(at))
        return [[BESIDE_MS if a != b and i == j else rows[i][j] for b, j in ends] for a, i in ends]

    lists = {key: value for key, value in matrix.items() if isinstance(value, list)}
    names = [f"{number} {matrix['names'][i]}" for number, i in enumerate(at)]
    picked = {
        key: table(value) if isinstance(value[0], list) else [value[i] for i in at]
        for key, value in lists.items()
    }
    return matrix | picked | {"names": names}
