"""The log of a run's decisions: records in an append-only file, or packed in memory.

The file is durable when `append` returns. A frame is a head of 16 bytes (payload length u32, check of the
head, 8 bytes of the payload's blake3) and the payload, a record as msgpack. A crash while appending leaves a
cut frame, a file grown by zeros, or a last frame in which whole disk blocks are zeros: that tail was never
acknowledged and is cut off on open. Any other inconsistency is damage to acknowledged records, and refused:
going on would forget a decision.

In memory records are kept as bytes, in a fifth of the space of objects; they are read seldom. A record that
another sequence keeps takes next to nothing.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

import msgpack
from blake3 import blake3

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.run.durable_files import disk_errors, sync_folder
from hetpeer.dht.base.errors import ExitCode, LocalError

ROW = 256
"""Records per read when iterating over all."""


class Records(Sequence[Any], ABC):
    """Sequence of records; each access returns a new object."""

    @abstractmethod
    def read(self, begin: int, end: int) -> list[Any]:
        """Records `begin` to `end` - 1; all of them exist."""

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        places = range(len(self))[place]
        if isinstance(places, int):
            return self.read(places, places + 1)[0]
        if places.step == 1:
            return self.read(places.start, max(places.start, places.stop))
        return [self[one] for one in places]

    def __iter__(self) -> Iterator[Any]:
        """All records, including those appended during the iteration."""
        begin = 0
        while row := self[begin : begin + ROW]:
            yield from row
            begin += len(row)


class PackedRecords(Records):
    """Packed records in order; None is a valid record."""

    def __init__(self, records: Iterable[Record | None] = ()) -> None:
        self._packed: list[bytes | None] = []
        """Bytes of each record; None: the shelf has it."""
        self._there = array("Q")
        """Position of a shelved record on the shelf."""
        self._shelf: Sequence[Record] = ()
        self.put(0, records)

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, begin: int, records: Iterable[Record | None]) -> None:
        """Keep the first `begin` records and append `records`."""
        self._packed[begin:] = map(msgpack.packb, records)
        self._there[begin:] = array("Q", bytes(8 * (len(self._packed) - begin)))

    def shelve(self, place: int, shelf: Sequence[Record], there: int) -> None:
        """Let `shelf`, the same one for all, keep record `place` as its record `there`."""
        self._shelf = shelf
        self._packed[place] = None
        self._there[place] = there

    def read(self, begin: int, end: int) -> list[Any]:
        """Records [begin, end); packed or from the shelf."""
        return [self._record(place) for place in range(begin, end)]

    def _record(self, place: int) -> Any:
        packed = self._packed[place]
        if packed is None:
            return self._shelf[self._there[place]]
        return msgpack.unpackb(packed, strict_map_key=False)


HEAD = struct.Struct("<I4s8s")
MAX_RECORD_BYTES = 64 * 2**20
BLOCK = 512
"""Smallest unit in bytes that a disk loses as a whole."""
LOST = 16
"""Fewest zeros, in bytes, at the edge of a frame that are taken for a lost block: fewer may be content."""
JOURNAL = "raft.log"
"""Name of the log beside it from which a reliable peer tells its ledger again (consensus/replica.py)."""

_log = logging.getLogger(__name__)


class Log(Records):
    """An open log as a sequence of records, read from disk. Append from one thread; any thread may read."""

    def __init__(self, path: Path, descriptor: int, ends: array[int]) -> None:
        self.path = path
        self._descriptor = descriptor
        self._ends = ends
        """Offsets at which records end, after a leading 0."""

    @classmethod
    def open(cls, path: Path) -> Log:
        """Open or create the log, for this process alone, and cut off a torn tail.

        Raises `LocalError`: HP-LOG-001 if an acknowledged record is damaged, HP-LOG-002 if another process
        has it open, HP-DISK-001 or HP-DISK-002 if it cannot be written.
        """
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path)
            ends, torn = _scan(path)
            with disk_errors(path):
                if torn:  # a record was being written when the process died
                    os.ftruncate(descriptor, ends[-1])
                    _log.warning("%s ended with %d bytes of an unfinished record: removed", path, torn)
                os.fsync(descriptor)
                sync_folder(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, ends)

    def append(self, *records: dict[str, Any]) -> None:
        """Add records, durable on return. Raises `LocalError` HP-DISK-002 (or 001), the log unchanged."""
        frames = [_frame(record) for record in records]
        data = b"".join(frames)
        try:
            with disk_errors(self.path, len(data)):
                self._write(data)
                os.fsync(self._descriptor)
        except LocalError:
            os.ftruncate(self._descriptor, self._ends[-1])
            raise
        for frame in frames:
            self._ends.append(self._ends[-1] + len(frame))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, begin: int, end: int) -> list[Any]:
        """Records `begin` to `end` - 1. Raises `LocalError` HP-LOG-001 if one is damaged on the disk."""
        ends = self._ends[begin : end + 1]
        try:
            data = self._bytes(ends[0], ends[-1])
        except OSError as error:
            raise _damaged(self.path, ends[0]) from error
        found = []
        for first, last in itertools.pairwise(ends):
            frame = data[first - ends[0] : last - ends[0]]
            payload = frame[HEAD.size :]
            if frame[: HEAD.size] != _head(payload):
                raise _damaged(self.path, first)
            found.append(msgpack.unpackb(payload, strict_map_key=False))
        return found

    def close(self) -> None:
        """Close the file; nothing can be read or written afterwards."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def __repr__(self) -> str:
        return f"<Log {self.path} {self._ends[-1]} bytes>"

    def _bytes(self, begin: int, end: int) -> bytes:
        parts = []
        while part := os.pread(self._descriptor, end - begin, begin):
            parts.append(part)
            begin += len(part)
        return b"".join(parts)

    def _write(self, frame: bytes) -> None:
        rest = memoryview(frame)
        position = self._ends[-1]
        while rest:
            written = os.pwrite(self._descriptor, rest, position)
            rest = rest[written:]
            position += written


class FirstRecords(Records):
    """The first `length` records of `log`; raise `length` to see later ones."""

    def __init__(self, log: Log) -> None:
        self.length = len(log)
        self._log = log

    def __len__(self) -> int:
        return self.length

    def read(self, begin: int, end: int) -> list[Any]:
        """Records [begin, end) of the log."""
        return self._log.read(begin, end)


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """All acknowledged records of a log that another process may be writing. A torn tail is left alone.

    Raises `LocalError` HP-LOG-001 at the first damaged one; a missing file has no records.
    """
    for _, record in _frames(path):
        yield record


def in_use(path: Path) -> bool:
    """Whether a process has the log at `path` open for writing."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks: then nobody serves from it
            return False
    return False


def _frame(record: dict[str, Any]) -> bytes:
    payload: bytes = msgpack.packb(record)
    if len(payload) > MAX_RECORD_BYTES:
        raise ValueError(f"a log record of {len(payload)} bytes")
    return _head(payload) + payload


def _head(payload: bytes) -> bytes:
    length, digest = len(payload), blake3(payload).digest(8)
    return HEAD.pack(length, _check(length, digest), digest)


def _check(length: int, digest: bytes) -> bytes:
    """Four-byte check of the head, so that a damaged length does not pass for a torn tail."""
    return blake3(struct.pack("<I", length) + digest).digest(4)


def _scan(path: Path) -> tuple[array[int], int]:
    """Offsets of acknowledged records' ends, after a leading 0, and the number of torn bytes after them."""
    ends = array("Q", (0,))
    ends.extend(end for end, _ in _frames(path))
    return ends, path.stat().st_size - ends[-1]


def _frames(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset after the record, record) up to the end or a torn tail."""
    if not path.exists():
        return
    with path.open("rb") as file:
        offset = 0
        while head := file.read(HEAD.size):
            if len(head) < HEAD.size:
                return
            length, check, digest = HEAD.unpack(head)
            if check != _check(length, digest) or length > MAX_RECORD_BYTES:
                cut = -offset % BLOCK  # of a head across two blocks the first may be there
                if any(head[cut if cut < HEAD.size else 0 :]) or not _all_zeros(file):
                    raise _damaged(path, offset)
                return
            payload = file.read(length)
            if len(payload) < length:
                return
            if blake3(payload).digest(8) != digest:
                if (any(payload) and not _lost_a_block(head + payload, offset)) or not _all_zeros(file):
                    raise _damaged(path, offset)
                return
            offset += HEAD.size + length
            yield offset, msgpack.unpackb(payload, strict_map_key=False)


def _lost_a_block(frame: bytes, offset: int) -> bool:
    """Whether a disk block's part of `frame`, which begins at `offset` of the file, is zeros."""
    edges = [0, *range(-offset % BLOCK, len(frame), BLOCK), len(frame)]
    parts = (frame[begin:end] for begin, end in itertools.pairwise(edges))
    return any(len(part) >= LOST and not any(part) for part in parts)


def _all_zeros(file: BinaryIO) -> bool:
    """Whether the rest of `file` is zeros, or nothing."""
    return not any(any(part) for part in iter(lambda: file.read(1 << 20), b""))


def _lock(descriptor: int, path: Path) -> None:
    """Lock the log for this process. Raises `LocalError` HP-LOG-002 if another process holds it."""
    with disk_errors(path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LocalError(
                "HP-LOG-002",
                f"{path} is in use by another process",
                why="this run is already being served on this machine",
                fix="stop the other hetpeer bootstrap first",
                exit_code=ExitCode.IDENTITY,
            ) from error


def _damaged(path: Path, offset: int) -> LocalError:
    fix = (
        "restore the file from a copy if this is the only reliable peer; of several, name another in its "
        "place (hetpeer amend)"
    )
    if path.name != JOURNAL and _is_sound(journal := path.with_name(JOURNAL)):
        fix = f"move this file away and serve the run again: {journal}, which is sound, tells it again"
    return LocalError(
        "HP-LOG-001",
        f"{path} is damaged at byte {offset}",
        why="a record that was safely on the disk has changed since, or cannot be read",
        fix=fix,
        exit_code=ExitCode.VERSION,
    )


def _is_sound(path: Path) -> bool:
    """Whether the log at `path` has records, and none of them is damaged."""
    try:
        return sum(1 for _ in _frames(path)) > 0
    except (LocalError, OSError):
        return False
