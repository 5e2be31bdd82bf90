"""Processor quota of this process: how much processor time its control groups allow, and what that means for
a measured speed.

A container with half a processor (`docker --cpus 0.5`) computes at full speed until its quota of a period
(100 ms as a rule) is used, and stands still for the rest of it. So what takes less than the quota seems as
fast as on a whole processor. In the long run processor time c takes at least c / quota seconds, whatever else
the machine does; `sustained_s` says so of a single measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc/self")
_MOUNT_FIELDS: Final = 6
"""Fields of a line of mountinfo before the optional ones."""


def quota(proc: Path = PROC) -> float:
    """Processors that the control groups of this process allow: 0.5 is half of one; infinite if unlimited.

    The tightest of all groups above the process counts, of both versions of control groups (the files
    `cpu.max`, and `cpu.cfs_quota_us` with `cpu.cfs_period_us`). What cannot be read counts as unlimited.
    `proc`: folder with `cgroup` and `mountinfo`.

        quota()  # inf on a desktop, 0.5 in a container of half a processor
    """
    try:
        joined = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return math.inf
    groups = {}
    for line in joined:
        number, controllers, path = line.split(":", 2)
        groups["" if number == "0" else "cpu" if "cpu" in controllers.split(",") else controllers] = path
    found = [math.inf]
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        if len(fields) < _MOUNT_FIELDS or not kind.startswith("cgroup"):
            continue
        version = "" if kind == "cgroup2" else "cpu"
        if version in groups and (kind == "cgroup2" or "cpu" in options.split(",")):
            found += _limits(Path(fields[4]), Path(fields[3]), Path(groups[version]))
    return min(found)


def _limits(mount: Path, root: Path, group: Path) -> list[float]:
    """Limits of `group` and those above it, as far as they are visible at `mount`, which shows group `root`.

    In a container the mount often shows the container's own group only, under whatever name.
    """
    at = mount / group.relative_to(root) if group.is_relative_to(root) else mount
    above = [at, *at.parents]
    return [limit_of(folder) for folder in above[: above.index(mount) + 1]]


def limit_of(group: Path) -> float:
    """Processors that the control group in this folder allows its processes; infinite if it does not say.

    >>> limit_of(Path("/nowhere"))
    inf
    """
    try:
        if (both := group / "cpu.max").is_file():
            allowed, period = both.read_text().split()
        else:
            allowed = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return int(allowed) / int(period) if allowed not in ("max", "-1") else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def sustained_s(wall_s: float, processor_s: float, processors: float) -> float:
    """Seconds that work takes in the long run which took `wall_s`, and `processor_s` of all its threads.

    `processors`: the quota. Work that was stopped in between took longer at once, so of several measurements
    the shortest counts.

    >>> sustained_s(0.01, 0.01, processors=0.25)
    0.04
    >>> sustained_s(0.01, 0.02, processors=4.0)
    0.01
    """
    return max(wall_s, processor_s / processors)


def stopwatch(processors: float) -> Callable[[], float]:
    """Begin to measure work of this process; the result gives the seconds since then, as `sustained_s`.

    taken_s = stopwatch(quota())
    matrix @ matrix
    print(taken_s())
    """
    wall, processor = time.perf_counter(), time.process_time()
    return lambda: sustained_s(time.perf_counter() - wall, time.process_time() - processor, processors)
