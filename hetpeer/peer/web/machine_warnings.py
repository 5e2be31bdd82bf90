"""Warnings about a running daemon and its machine: those of `hetpeer doctor` that need no other peer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetpeer.dht.base.errors import HetpeerError, LocalError
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind
from hetpeer.peer.checkup import local_checks, thresholds
from hetpeer.peer.checkup.thresholds import Verdict

CODES = ("HP-DISK-002", "HP-DISK-004", "HP-GPU-004", "HP-NET-015", "HP-SYS-002", "HP-SYS-003", "HP-SYS-007")
"""Codes of all possible warnings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineWarning:
    """A warning in words."""

    code: str
    what: str
    why: str
    fix: str


@dataclass(eq=False)
class MachineWarnings:
    """Warnings of a daemon with files in `folder`, its `reach`, and the problems `found` by its sensors."""

    _folder: Path
    _reach: Callable[[], ReachEstimate]
    _found: Callable[[], Iterable[HetpeerError]] = tuple

    def look(self) -> tuple[MachineWarning, ...]:
        """Current warnings. Takes less than a millisecond."""
        return tuple(
            MachineWarning(code=e.code, what=self._shortened(e.what), why=e.why, fix=e.fix)
            for e in self._errors()
        )

    def _shortened(self, what: str) -> str:
        """`what` with the name of the daemon's folder instead of its path: others may see the page."""
        return what.replace(str(self._folder), self._folder.name or ".")

    def _errors(self) -> Iterator[HetpeerError]:
        """Present warnings: disk, open files, clock, reachability, sensors."""
        looks: tuple[Callable[[], Verdict], ...] = (
            lambda: thresholds.disk(shutil.disk_usage(self._folder).free, "the daemon's folder"),
            local_checks.open_files,
            local_checks.clock,
            self._reached,
        )
        for look in looks:
            try:
                verdict = look()
            except LocalError as error:  # what keeps a volunteer from starting is no more than a warning here
                verdict = error
            except OSError:  # the folder is gone: its users report that
                continue
            if isinstance(verdict, HetpeerError):
                yield verdict
        yield from self._found()

    def _reached(self) -> Verdict:
        """Warning about reachability; none while that is unknown, since it is asked again."""
        standing = self._reach()
        return "" if standing.reach is ReachKind.UNKNOWN else thresholds.reach(standing)
