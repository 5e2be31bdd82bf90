"""Processors of the laboratory: who is on one has so much of this machine's, as if it had a slower one of
its own. Linux control groups, root.

Without them whoever does more has more of this machine, and takes it from everybody else, as no home computer
takes it from another.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

PERIOD_US = 10_000
"""It stands still for a part of each of these.

Who has waited begins at full speed, until the part of one is used: of longer ones who waits often would be
faster than its processor (30 ms of work after pauses at 0.45 of one: 1.15 times as fast with these, 1.46
times with five times as much).
"""
LEAST_US = 1000
"""The kernel takes no smaller part: slower processors have longer periods."""
_ROOT = Path("/sys/fs/cgroup")
_UNIFIED = (_ROOT / "cgroup.controllers").exists()
"""Whether it is the second version of control groups."""
FOLDER = _ROOT if _UNIFIED else _ROOT / "cpu"
"""Where groups for processors are."""
PREFIX = "hetpeer"


def missing() -> str:
    """Why there can be none here; empty if there can."""
    try:
        with Processor(os.getpid(), 1.0):
            return ""
    except OSError as error:
        return f"no control groups for processors: {error}"


class Processor:
    """A control group, for process `pid` and the children that it starts from then on. Whoever is on it
    when it is closed has all of this machine again.

    Raises OSError where the system lets us make none. Groups that a killed process has left go when the next
    is made.
    """

    def __init__(self, pid: int, cores: float) -> None:
        if _UNIFIED:
            (FOLDER / "cgroup.subtree_control").write_text("+cpu")
        _remove_leftovers()
        self._path = FOLDER / f"{PREFIX}-{os.getpid()}-{pid}"
        self._path.mkdir()
        try:
            self.hold(cores)
            (self._path / "cgroup.procs").write_text(str(pid))
        except OSError:
            self._path.rmdir()
            raise

    def hold(self, cores: float) -> None:
        """From now on it is as fast as so much of a processor of this machine."""
        period = max(PERIOD_US, math.ceil(LEAST_US / cores))
        quota = max(int(cores * period), LEAST_US)
        if _UNIFIED:
            (self._path / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._path / "cpu.cfs_period_us").write_text(str(period))
            (self._path / "cpu.cfs_quota_us").write_text(str(quota))

    def close(self) -> None:
        _remove(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _remove(path: Path) -> None:
    while pids := (path / "cgroup.procs").read_text().split():  # more of them may start meanwhile
        for pid in pids:
            with suppress(ProcessLookupError):
                (path.parent / "cgroup.procs").write_text(pid)
    path.rmdir()


def _remove_leftovers() -> None:
    for path in FOLDER.glob(f"{PREFIX}-*-*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            with suppress(FileNotFoundError):  # somebody else has
                _remove(path)
