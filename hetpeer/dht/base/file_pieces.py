"""Files that are read and written piece by piece, so that what is in memory does not grow with them.

They are never mapped: a mapped file that is cut short ends the process with a signal, and its pages count as
the process's memory. Here an error is an `OSError`.

    file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    part = FilePart(file, 0, file.nbytes)
    for piece in pieces(part):
        hasher.update(piece)
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PIECE_BYTES = 1 << 22
"""Bytes that are read or written at a time."""


class Readable(Protocol):
    """Bytes that can be read from any place on."""

    @property
    def nbytes(self) -> int:
        """Their number."""

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill `target` from byte `begin` on. Raises OSError, also if there are fewer bytes."""


class Writable(Protocol):
    """A place that bytes are written to."""

    def write(self, begin: int, data: Any) -> None:
        """Write the buffer `data` from byte `begin` on. Raises OSError."""


class OpenFile:
    """An open file, closed with the last reference to it: never under somebody who still reads."""

    def __init__(self, descriptor: int) -> None:
        """Take over `descriptor`."""
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @classmethod
    def nameless(cls, folder: Path) -> OpenFile:
        """A new file on the disk of `folder`, of which nothing is left whatever happens. Raises OSError."""
        return cls(_nameless(folder))

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return os.fstat(self.descriptor).st_size


@dataclass(frozen=True, slots=True)
class FilePart:
    """`nbytes` bytes of `file` from byte `offset` on."""

    file: OpenFile
    offset: int
    nbytes: int

    @classmethod
    def whole(cls, path: Path) -> FilePart:
        """All of the file `path`, to be read. Raises OSError."""
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return cls(file, 0, file.nbytes)

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill `target` from byte `begin` of the part on. Raises OSError, EIO if the file is cut short."""
        self._check(begin, len(target))
        offset, rest = self.offset + begin, target
        while rest:
            count = os.preadv(self.file.descriptor, [rest], offset)
            if not count:
                raise OSError(errno.EIO, "the file is cut short")
            offset, rest = offset + count, rest[count:]

    def write(self, begin: int, data: Any) -> None:
        """Write the buffer `data` from byte `begin` of the part on. Raises OSError."""
        rest = memoryview(data).cast("B")
        self._check(begin, len(rest))
        offset = self.offset + begin
        while rest:
            count = os.pwrite(self.file.descriptor, rest, offset)
            offset, rest = offset + count, rest[count:]

    def _check(self, begin: int, length: int) -> None:
        if begin < 0 or begin + length > self.nbytes:
            raise OSError(errno.EINVAL, f"bytes {begin}…{begin + length} are not in {self.nbytes} bytes")


class InMemory:
    """Bytes in memory, read like a file."""

    def __init__(self, data: Any) -> None:
        """`data` is any bytes-like object."""
        self._view = memoryview(data).cast("B")

    @property
    def nbytes(self) -> int:
        """Their number."""
        return len(self._view)

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill `target` from byte `begin` on. Raises OSError if there are fewer bytes."""
        if begin < 0 or begin + len(target) > len(self._view):
            raise OSError(errno.EIO, "the data are cut short")
        target[:] = self._view[begin : begin + len(target)]


def read(source: Readable, begin: int, nbytes: int) -> bytearray:
    """`nbytes` bytes from `begin` on. Raises OSError."""
    data = bytearray(nbytes)
    source.read_into(begin, memoryview(data))
    return data


def pieces(source: Readable, size: int = PIECE_BYTES) -> Iterator[memoryview]:
    """All bytes of `source` in pieces of `size`; each is valid until the next. Raises OSError."""
    buffer = memoryview(bytearray(min(size, source.nbytes)))
    for begin in range(0, source.nbytes, size):
        piece = buffer[: source.nbytes - begin]
        source.read_into(begin, piece)
        yield piece


def shrink(file: OpenFile, length: int) -> None:
    """Give the disk what `file` has beyond `length`, if it can take it."""
    with contextlib.suppress(OSError):
        os.ftruncate(file.descriptor, length)


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    descriptor, name = tempfile.mkstemp(dir=folder)  # a file system that cannot do without a name
    Path(name).unlink()
    return descriptor
