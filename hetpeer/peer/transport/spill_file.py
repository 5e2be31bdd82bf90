"""A nameless file for tensors that must be kept and do not fit into memory: nothing is left of it, whatever
happens.

It is written and read on the loop: a bundle is a few megabytes in the system's page cache. A tensor that the
file has no room for is refused, and stays in memory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
from pathlib import Path

from hetpeer.stages.ipc.arena import Extent, FreeList

ALIGNMENT = 4096

_log = logging.getLogger(__name__)


class SpillFile:
    """A nameless file of at most `limit` bytes on the disk of `folder`; made when it is first needed."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.limit = limit
        self.used = 0
        """Bytes of the file that are taken."""
        self._folder = folder
        self._free = FreeList(_aligned(limit))
        self._descriptor: int | None = None
        self.refusal = ""
        """Reason of the last refusal, until the file is empty again."""
        self._said = False
        self._told: set[str] = set()
        """Reasons of refusals that were logged: each step may have some."""

    def put(self, data: memoryview) -> Extent | None:
        """Keep a copy of `data`; None if there is no room for it, on the disk or within the limit."""
        size = _aligned(max(len(data), 1))
        offset = self._free.take(size)
        if offset is None:
            self._refuse(f"the limit of {self.limit >> 20} MiB is reached")
            return None
        try:
            self._write(data, offset)
        except OSError as error:
            self._free.give(offset, size)
            self._refuse(error.strerror or str(error))
            return None
        if not self._said:
            self._said = True
            _log.info("memory is full: tensors that are kept for others go to the disk at %s", self._folder)
        self.used += size
        return Extent(offset, len(data))

    def get(self, place: Extent, into: memoryview) -> None:
        """Copy what lies at `place` into `into`, of the same length."""
        assert self._descriptor is not None
        offset, rest = place.offset, into
        while rest:
            count = os.preadv(self._descriptor, [rest], offset)
            if not count:
                raise OSError(errno.EIO, "a spilled tensor is cut short")
            offset, rest = offset + count, rest[count:]

    def drop(self, place: Extent) -> None:
        """Free `place`. With nothing left in the file, the disk gets everything back."""
        size = _aligned(max(place.nbytes, 1))
        self._free.give(place.offset, size)
        self.used -= size
        if not self.used and self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self.refusal = ""

    def close(self) -> None:
        """Free the file and everything in it. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, data: memoryview, offset: int) -> None:
        if self._descriptor is None:
            self._descriptor = _nameless(self._folder)
        rest, size = data, os.fstat(self._descriptor).st_size
        try:
            while rest:
                count = os.pwrite(self._descriptor, rest, offset)
                offset, rest = offset + count, rest[count:]
        except OSError:
            with contextlib.suppress(OSError):  # others need the last bytes of a full disk
                os.ftruncate(self._descriptor, size)
            raise

    def _refuse(self, why: str) -> None:
        self.refusal = self.refusal or why
        if why not in self._told:
            self._told.add(why)
            _log.warning("memory is full, and so is what there is of the disk: %s", why)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    descriptor, name = tempfile.mkstemp(dir=folder)  # a file system that cannot do without a name
    Path(name).unlink()
    return descriptor
