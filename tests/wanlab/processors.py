"""Processors of the laboratory's nodes: who is in one's control group has so much of this machine's, as if it had a slower one of its own. Linux, root.

Without them whoever does more has more of this machine, and takes it from everybody else, as no home computer takes it from another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

PERIOD_US = 20_000
"""A held processor stands still for a part of each of these."""
_ROOT = Path("/sys/fs/cgroup")


_UNIFIED = (_ROOT / "cgroup.controllers").exists()
"""Whether it is the second version of control groups."""
FOLDER = _ROOT if _UNIFIED else _ROOT / "cpu"
"""Where groups for processors are."""


class Processor:
    """A control group of that name. All of the machine's processors are its own until it is held. Raises OSError where the system lets us make none."""

    def __init__(self, name: str) -> None:
        if _UNIFIED:
            (FOLDER / "cgroup.subtree_control").write_text("+cpu")
        self._path = FOLDER / name
        self._path.mkdir()

    def starting(self, command: Sequence[str]) -> Sequence[str]:
        """The command that starts `command` on it; its children are on it too."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._path / "cgroup.procs"), *command)

    def take(self, pid: int) -> None:
        """A process that runs already is on it from now on; its children are only if they start later."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def hold(self, cores: float | None) -> None:
        """From now on it is as fast as so much of a processor of this machine; None: as all of them."""
        quota = None if cores is None else max(int(cores * PERIOD_US), 1000)  # no less is taken
        if _UNIFIED:
            (self._path / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")
        else:
            (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._path / "cpu.cfs_quota_us").write_text("-1" if quota is None else str(quota))

    def close(self) -> None:
        remove(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def remove(path: Path) -> None:
    """A group; who is still on it goes back to all processors."""
    for pid in (path / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (path.parent / "cgroup.procs").write_text(pid)
    path.rmdir()
