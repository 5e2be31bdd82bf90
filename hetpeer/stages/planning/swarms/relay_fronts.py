"""Reliable peers as fronts between volunteers that do not reach each other (HPS, section 3.2; docs/nat.md).
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hetpeer.stages.planning.swarms.plan_inputs import Devices

Through = Mapping[tuple[int, int], int]
"""(from, to) → the front between two devices that do not reach each other."""


def through_fronts(devices: Devices, fronts: int) -> tuple[Devices, Through]:
    """Devices without the last `fronts` of them, which compute nothing and relay.

    A pair without a link gets that of the front with the highest rate, the nearest of equals: the rate of the
    slower half, the latency of both. All that may need a front count on an equal part of each one's uplink. A
    pair that no front reaches stays without a link.
    """
    count = len(devices) - fronts
    own = devices.some(range(count))
    apart = (own.bandwidth <= 0) & ~np.eye(count, dtype=np.bool_)
    if not fronts or not apart.any():
        return own, {}
    bandwidth, latency = own.bandwidth.copy(), own.latency.copy()
    needing = int(apart.any(axis=1).sum())
    through: dict[tuple[int, int], int] = {}
    behind = slice(count, None)
    for one, other in np.argwhere(apart).tolist():
        halves = np.minimum(devices.bandwidth[one, behind], devices.bandwidth[behind, other])
        rates = np.minimum(halves, devices.uplink[behind] / needing)
        ways = devices.latency[one, behind] + devices.latency[behind, other]
        best = int(np.lexsort((ways, -rates))[0])
        if rates[best] > 0:
            bandwidth[one, other], latency[one, other] = rates[best], ways[best]
            through[one, other] = best
    return replace(own, bandwidth=bandwidth, latency=latency), through
