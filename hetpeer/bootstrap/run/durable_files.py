"""Writing to a disk that may be full, read-only or about to lose power.

A file is either the old one or the new one, never a part: written beside its place, synced, renamed, and the
folder synced. What the operating system refuses becomes one of two errors: HP-DISK-001 (cannot write there)
and HP-DISK-002 (no room). Names that come from outside are checked before they become paths.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.file_pieces import PIECE_BYTES, FilePart, OpenFile, pieces
from hetpeer.dht.base.runtime import process_folder

FILE_NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REMEDIES = {
    errno.EISDIR: "give the name of a file: this is the name of a folder",
    errno.ENOTDIR: "choose another path: a part of this one is a file",
    errno.EEXIST: "choose another name: this one is taken",
    errno.ENOENT: "make the folder first, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""Advice for an error of the operating system; errors without their own text concern permissions."""


@contextmanager
def disk_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Context that turns an `OSError` from writing `path` into a `LocalError` HP-DISK-001 or HP-DISK-002.

    `needed`: bytes that are written, for the message; 0: unknown.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            why = error.strerror or str(error)
            raise _no_room(
                path, f"{why}: {_free_and(path, needed)}" if error.errno == errno.ENOSPC else why
            ) from error
        raise LocalError(
            "HP-DISK-001",
            f"cannot write {path}",
            why=error.strerror or str(error),
            fix=REMEDIES.get(error.errno or 0, "choose a folder you may write to"),
            exit_code=ExitCode.CONFIG,
        ) from error


def _no_room(path: Path, why: str) -> LocalError:
    return LocalError(
        "HP-DISK-002",
        f"no room to write {path}",
        why=why,
        fix="free some space, or choose a folder on another disk",
        exit_code=ExitCode.TOO_SMALL,
    )


def _free_and(path: Path, needed: int) -> str:
    """Free bytes of the disk of `path` in words, and the bytes `needed` there; 0: unknown."""
    free = f"{_free(path):,} bytes are free"
    return f"{free}, {needed:,} are needed" if needed else free


def _free(path: Path) -> int:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(there).free


def leave_room(path: Path, needed: int) -> None:
    """Raise `LocalError` HP-DISK-002 unless `needed` bytes are free on the disk of `path`."""
    if _free(path) < needed:
        raise _no_room(path, _free_and(path, needed))


def probe_room(folder: Path, needed: int) -> None:
    """Write `needed` bytes into a nameless file of `folder` and sync them; nothing stays of them.

    Raises `LocalError` HP-DISK-001 or HP-DISK-002, also because of a quota.
    """
    with disk_errors(folder, needed), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(needed))
        file.flush()
        os.fsync(file.fileno())


def atomic_write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write or replace a file: a crash at any moment leaves the old content or the new, and nothing else.

    Durable when it returns. Raises `LocalError` HP-DISK-001 or HP-DISK-002, then with nothing changed.
    """
    atomic_write_parts(path, (data,), mode, nbytes=len(data))


def atomic_write_parts(path: Path, parts: Iterable[bytes], mode: int = 0o644, *, nbytes: int = 0) -> None:
    """`atomic_write` of content that comes in parts. `nbytes`: its size, for messages; 0: unknown.

    Errors of `parts` pass through, with nothing changed.
    """
    with GrowingFile(path, nbytes) as file:
        at, waiting = 0, bytearray()
        for part in parts:
            if len(waiting) + len(part) > PIECE_BYTES:
                file.write(at, waiting)
                at, waiting = at + len(waiting), bytearray()
            waiting += part
        file.write(at, waiting)
        file.keep(path, mode)


class GrowingFile:
    """A file that gets its name once it is complete; without `keep` nothing is left of it.

    Used as a context manager, by one thread at a time.

        with GrowingFile(path) as file:
            file.write(0, data)
            file.keep(path)
    """

    def __init__(self, path: Path, nbytes: int = 0) -> None:
        """`path` is the place it is meant for, `nbytes` its size for messages; 0: unknown.

        Raises `LocalError` HP-DISK-001 or HP-DISK-002, as `write` and `keep` do.
        """
        self.place = path
        self._nbytes = nbytes
        with disk_errors(path, nbytes):
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self._file = OpenFile(descriptor)
        self._name: Path | None = Path(name)

    def begin(self, nbytes: int) -> None:
        """Drop what was written; `nbytes` are to come."""
        self._nbytes = nbytes
        with disk_errors(self.place, nbytes):
            os.ftruncate(self._file.descriptor, 0)

    def write(self, begin: int, data: Any) -> None:
        """Write the buffer `data` from byte `begin` on."""
        length = memoryview(data).nbytes
        with disk_errors(self.place, self._nbytes):
            FilePart(self._file, begin, length).write(0, data)

    @property
    def part(self) -> FilePart:
        """The bytes that were written."""
        return FilePart(self._file, 0, self._file.nbytes)

    def keep(self, path: Path, mode: int = 0o644) -> None:
        """Give it the name `path`, in the folder that it was meant for; durable when this returns."""
        assert self._name is not None
        with disk_errors(path, self._nbytes):
            os.fchmod(self._file.descriptor, mode)
            os.fsync(self._file.descriptor)
            self._name.replace(path)
            self._name = None
            sync_folder(path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._name is not None:
            self._name.unlink(missing_ok=True)


@contextmanager
def made_beside(
    directory: Path, may_replace: Callable[[Path], bool] = lambda _folder: False
) -> Iterator[Path]:
    """A folder that becomes `directory` if the body succeeds and vanishes if it does not.

    A folder that is there already must be empty, or one that `may_replace` knows. Raises `LocalError`
    HP-DISK-003, HP-DISK-001, HP-DISK-002.
    """
    full = directory.is_dir() and any(directory.iterdir())
    if full and not may_replace(directory):
        raise LocalError(
            "HP-DISK-003",
            f"{directory} exists and is not empty",
            why="nothing is written over what may still be needed",
            fix="choose another directory, or remove this one",
            exit_code=ExitCode.CONFIG,
        )
    target = directory.resolve()
    missing = [parent for parent in target.parents if not parent.exists()]
    with disk_errors(directory):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        with disk_errors(directory):
            folder.chmod(0o755)
            for part in (*folder.iterdir(), folder):
                if part.is_dir():
                    sync_folder(part)
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) if full else None
            if old is not None:
                target.rename(old / target.name)
            folder.rename(target)
            if old is not None:
                shutil.rmtree(old)
            sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(folder)
        for parent in missing:
            with suppress(OSError):  # others may have put something there
                parent.rmdir()
        raise


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Temporary folder, removed on exit. Raises `LocalError` HP-DISK-001 or HP-DISK-002."""
    with disk_errors(Path(os.environ.get("TMPDIR", "/tmp"))):  # noqa: S108 - it is named, not used
        folder = process_folder(purpose)
    with folder as name:
        yield Path(name)


def sync_folder(folder: Path) -> None:
    """Make renames and new entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Blake3 of the content, 64 hex digits, read in pieces. Raises OSError."""
    hasher = blake3()
    for piece in pieces(FilePart.whole(path)):
        hasher.update(piece)
    return hasher.hexdigest()


def safe_join(folder: Path, name: str) -> Path:
    """`folder / name` for a name from outside. Raises ValueError unless it fits `FILE_NAME`."""
    if not re.fullmatch(FILE_NAME, name):
        raise ValueError(f"not a file name: {name[:80]!r}")
    return folder / name
