"""Devices and the links between them as a plan's input: latency and bandwidth of every pair, checked.

Pure. Reliable peers are fronts between volunteers that do not reach each other (HPS, section 3.2;
docs/nat.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.planning.swarms.plan_inputs import Devices

MOST = 1e9
"""Largest number accepted; as milliseconds it is a week and a half."""
LEAST_GBIT_S = 1e-9


@dataclass(frozen=True, slots=True)
class DeviceNetwork:
    """N devices; [i, j] is from i to j, the diagonal has no meaning."""

    latency_s: NDArray[np.float64]
    bandwidth_gbit_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.latency_s)

    @classmethod
    def of(cls, document: Mapping[str, Any], *, apart: bool = False) -> DeviceNetwork:
        """The network in `latency_ms` and `bandwidth_gbit_s`, N x N lists; with `apart`, pairs may have no
        link.

        Raises `LocalError` HP-PLAN-002 for the first wrong entry.
        """
        latency, bandwidth = (_matrix(document, name) for name in ("latency_ms", "bandwidth_gbit_s"))
        if len(latency) != len(bandwidth):
            raise wrong(
                f"latency_ms is of {len(latency)} devices, bandwidth_gbit_s of {len(bandwidth)}",
                "give both for the same devices",
            )
        _check("latency_ms", latency, latency < 0, "a latency is 0 or more")
        pairs = ~np.eye(len(bandwidth), dtype=np.bool_)
        low, least = (bandwidth < 0, "0 or more") if apart else (bandwidth <= 0, "more than 0")
        _check("bandwidth_gbit_s", bandwidth, low & pairs, f"a bandwidth is {least}")
        slow = (bandwidth > 0) & (bandwidth < LEAST_GBIT_S)
        _check("bandwidth_gbit_s", bandwidth, slow & pairs, f"a line carries {LEAST_GBIT_S:g} at least")
        return cls(latency / 1e3, bandwidth)


def _matrix(document: Mapping[str, Any], name: str) -> NDArray[np.float64]:
    """The square matrix `name` of a document. Raises an error that names the wrong row or number."""
    rows = document.get(name)
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise wrong(f"there is no matrix {name}", "give a list of rows of numbers")
    for number, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise wrong(f"row {number} of {name} is no list", "give a list of rows of numbers")
        if len(row) != len(rows):
            raise wrong(
                f"row {number} of {name} has {len(row)} entries, and there are {len(rows)} rows",
                "give one row and one column for each device",
            )
        for column, entry in enumerate(row):
            if isinstance(entry, bool) or not isinstance(entry, int | float):
                raise wrong(f"row {number}, column {column} of {name} is {entry!r}", "give a number")
            if isinstance(entry, int) and abs(entry) > MOST:
                raise wrong(f"row {number}, column {column} of {name} is too large", f"give {MOST:g} or less")
    matrix = np.array(rows, dtype=np.float64)
    _check(name, matrix, ~np.isfinite(matrix), "give a finite number")
    _check(name, matrix, np.abs(matrix) > MOST, f"give {MOST:g} or less")
    return matrix


def _check(name: str, matrix: NDArray[np.float64], bad: NDArray[np.bool_], fix: str) -> None:
    if bad.any():
        row, column = (int(one) for one in np.argwhere(bad)[0])
        raise wrong(f"row {row}, column {column} of {name} is {matrix[row, column]:g}", fix)


def wrong(why: str, fix: str) -> LocalError:
    """HP-PLAN-002."""
    return LocalError(
        "HP-PLAN-002", "the devices cannot be read", why=why, fix=fix, exit_code=ExitCode.CONFIG
    )


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
