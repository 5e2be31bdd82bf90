"""The three networks in which swarms of four are measured: homes, a city, and four regions of the world.

Node 0 is where the bootstrap is, 1 to 4 the volunteers.
"""

from __future__ import annotations

import json
from typing import Any

from tests.wanlab.lab import MATRICES

FAR = ("oregon", "tokyo", "london", "seoul", "frankfurt")
"""Of DT-FM's eight regions. Whoever takes which stage, the pipeline crosses the world, at 17 to 21 Mbit/s."""


def network(name: str) -> dict[str, Any]:
    """What Lab takes: `homes`, `city` or `regions`."""
    matrix: dict[str, Any] = json.loads((MATRICES / f"{name}.json").read_text())
    if name != "regions":
        return matrix
    at = [matrix["names"].index(region) for region in FAR]
    picked = {
        key: [[table[a][b] for b in at] for a in at]
        for key, table in matrix.items()
        if key in ("latency_ms", "bandwidth_mbps")
    }
    return matrix | picked | {"names": list(FAR)}
