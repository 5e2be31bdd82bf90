"""Room on the disk for fetched files of runs: graphs, constants and shards, in `runs/` of the home
(docs/limits.md).

Room is made before anything is fetched. Files of other runs of this home go first, beginning with the run
that was joined longest ago; they can be fetched again. Then shards of this run go that nothing here needs
soon. Files that cannot be fetched (signed logs, traces, keys), and files of a run that was made here, are
never removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.arrival.destinations import RUN_ID

FETCHED = ("graph", "state", "data")
"""Folders of a run whose files others have, too."""
MIB = 1 << 20

_log = logging.getLogger(__name__)


class Reader(Protocol):
    """Reads shards of the run's data."""

    def wanted(self) -> Container[str]:
        """Names of those that stay."""

    def forget(self, shards: Sequence[str]) -> None:
        """Note that `shards` are removed, before anything else happens."""


class Room:
    """Room for files of the run `own` (its id) in the folder `runs`, which one process at a time writes to.

    `limit`: bytes for the whole folder, at any time.
    """

    def __init__(self, runs: Path, own: str, limit: Callable[[], float]) -> None:
        self._runs = runs
        self._own = own
        self.limit = limit
        self._lock = asyncio.Lock()
        self._taken: int | None = None
        """Bytes at the last count, and written since; None before a count."""
        self._coming = 0
        self._arrived = 0
        """Files that were written since the start."""
        self.reader: Reader | None = None
        """The reader of our run's data."""

    @asynccontextmanager
    async def for_file(self, nbytes: int) -> AsyncIterator[None]:
        """Keep room for `nbytes` while a file is fetched and written. Raises `LocalError` HP-DISK-005."""
        async with self._lock:
            await self._look_for(nbytes)
            self._coming += nbytes
        try:
            yield
            if self._taken is not None:
                self._taken += nbytes
        finally:
            self._arrived += 1
            self._coming -= nbytes

    async def _look_for(self, nbytes: int) -> None:
        """Make room for `nbytes` more: other runs' files first, then shards of ours. Raises `LocalError`."""
        wanted = self._coming + nbytes
        if self._taken is None:
            await asyncio.to_thread(self._clear_up)
            self._taken = await asyncio.to_thread(taken, self._runs)
        if self._taken + wanted <= self.limit():
            return
        now = await self._count()  # logs have grown, and somebody may have cleared up
        limit = self.limit()
        self._taken = now
        if (missing := now + wanted - limit) > 0:
            freed = await asyncio.to_thread(make_room, self._runs, self._own, missing)
            if freed < missing:
                freed += await self._spare_shards(missing - freed)
            self._taken -= freed
        if self._taken + wanted > limit:
            raise _no_room(self._runs, self._taken, wanted, limit)

    async def _count(self) -> int:
        """Bytes on the disk. A file that gets its name meanwhile may be missed, and all are counted again."""
        while True:
            before = self._arrived
            now = await asyncio.to_thread(taken, self._runs)
            if self._arrived == before:
                return now

    async def _spare_shards(self, nbytes: float) -> int:
        """Remove shards that our reader does not want, oldest first, for `nbytes`; returns freed bytes."""
        shards = await asyncio.to_thread(_by_age, self._runs / self._own)
        wanted: Container[str] = () if self.reader is None else self.reader.wanted()
        spared, freed = list[Path](), 0
        for path, size in shards:
            if freed < nbytes and path.name not in wanted:
                spared.append(path)
                freed += size
        if self.reader is not None:
            self.reader.forget([path.name for path in spared])
        for path in spared:  # at once: somebody may want it from the next moment on
            path.unlink(missing_ok=True)
        return freed

    def _clear_up(self) -> None:
        """Remove what a process that was killed has half written."""
        for folder in FETCHED:
            for file in _files(self._runs / self._own / folder):
                if file.name.startswith("."):
                    with suppress(OSError):
                        Path(file).unlink()


def check_room(runs: Path, own: str, nbytes: int, limit: float) -> None:
    """Raise `LocalError` HP-DISK-005 if `nbytes` of the run `own` would find no room even without all other
    runs.

    Nothing is removed.
    """
    others = (file for run in _others(runs, own) for file in _fetched(run))
    stay = taken(runs) - sum(file.stat(follow_symlinks=False).st_size for file in others)
    if stay + nbytes > limit:
        raise _no_room(runs, stay, nbytes, limit)


def _no_room(runs: Path, held: int, wanted: int, limit: float) -> LocalError:
    """HP-DISK-005; `held` is taken, and stays."""
    return LocalError(
        "HP-DISK-005",
        "there is no room for the run's files",
        why=f"{held / MIB:,.0f} MiB of the {limit / MIB:,.0f} that all runs may take are taken, "
        f"{wanted / MIB:,.1f} more are needed,"
        " and nothing can be spared",
        fix=f"allow more (hetpeer config set limits.files 100GiB), or remove what you do not need of {runs}",
        exit_code=ExitCode.TOO_SMALL,
    )


def taken(runs: Path) -> int:
    """Bytes of all files below, by their sizes."""
    found = 0
    for folder, _, names in os.walk(runs):
        for name in names:
            with suppress(OSError):  # it has just gone
                found += (Path(folder) / name).lstat().st_size
    return found


def make_room(runs: Path, own: str, nbytes: float) -> int:
    """Remove fetched files of runs other than `own` until `nbytes` are freed; returns the freed bytes."""
    freed = 0
    for run in sorted(_others(runs, own), key=_joined):
        before = freed
        for file in _fetched(run):
            if freed >= nbytes:
                break
            size = file.stat(follow_symlinks=False).st_size
            with suppress(OSError):
                Path(file).unlink()
                freed += size
        if freed > before:
            _log.warning(
                "the limit of the disk is reached: %.0f MiB of run %s made room",
                (freed - before) / MIB,
                run.name,
            )
    return freed


def _fetched(run: Path) -> Iterator[os.DirEntry[str]]:
    return (file for folder in FETCHED for file in _files(run / folder))


def _by_age(run: Path) -> list[tuple[Path, int]]:
    """Shards of a run with their sizes, oldest first; no half-written ones, none if the run was made here."""
    if (run / "owner.key").exists():
        return []
    found = [(file.stat(follow_symlinks=False), Path(file)) for file in _files(run / "data")]
    found.sort(key=lambda one: one[0].st_mtime_ns)
    return [(path, stat.st_size) for stat, path in found if not path.name.startswith(".")]


def _others(runs: Path, own: str) -> Iterator[Path]:
    """Folders of runs that were joined from here; never one in which a run was made."""
    with suppress(OSError):
        for entry in os.scandir(runs):
            path = Path(entry)
            is_run = RUN_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            if is_run and entry.name != own and not (path / "owner.key").exists():
                yield path


def _joined(run: Path) -> float:
    """Time at which the run was last joined: its manifest is written then."""
    try:
        return (run / "manifest.hetpeer").stat().st_mtime
    except OSError:
        return 0.0


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError):
        yield from (entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
