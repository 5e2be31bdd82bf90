"""Places in a nameless file: room on the disk for what memory is too small for, within the owner's limit.

A volunteer has two such files, the spill file (peer/transport/spill_file.py) and the exchange file, through
which states pass between daemon and worker (docs/memory.md). `DiskShare` is their common limit. Only the
daemon decides what lies where. A file is as long as its last place, or what is reserved of it; the disk gets
the rest back.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hetpeer.dht.base.file_pieces import FilePart, OpenFile, shrink
from hetpeer.stages.ipc.arena import Extent, FreeList

ALIGNMENT = 4096
_CAPACITY = 1 << 60


class DiskShare:
    """Bytes of the disk that some files may have together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def resize(self, old: int, new: int) -> bool:
        """Note that a file of `old` bytes gets `new` ones; False, and nothing noted, beyond the limit."""
        if new > old and self.used - old + new > self.limit:
            return False
        self.used += new - old
        return True


class NamelessFile:
    """A file on the disk of `folder`, made when it is first needed, in which places are taken and given back.

    file = NamelessFile(home, DiskShare(1 << 30))
    place = file.take(12_000_000)
    file.part(place).write(0, data)
    file.give(place)
    """

    def __init__(self, folder: Path, share: DiskShare) -> None:
        self.used = 0
        """Bytes of all places that are taken, each rounded up to ALIGNMENT."""
        self.share = share
        self._folder = folder
        self._free = FreeList(_CAPACITY)
        self._file: OpenFile | None = None
        self._closed = False
        self._length = 0
        self._reserved = 0

    @property
    def file(self) -> OpenFile:
        """The open file. Raises OSError if it cannot be made, or is closed."""
        if self._closed:
            raise OSError(errno.EBADF, "the file is closed")
        if self._file is None:
            self._file = OpenFile.nameless(self._folder)
        return self._file

    def reserve(self, nbytes: int) -> None:
        """Have the disk keep room for the first `nbytes` bytes, taken or not, in place of an earlier number.

        Places are taken as near to the begin as they fit. Raises OSError, with nothing reserved.
        """
        before, self._reserved = self._reserved, aligned(nbytes)
        try:
            if not self._resize():
                raise self._beyond_limit()
            os.posix_fallocate(self.file.descriptor, 0, self._reserved)
        except OSError:
            self._reserved = min(before, self._reserved)
            self._give_back()
            raise
        self._give_back()

    def take(self, nbytes: int) -> Extent:
        """A place for `nbytes` bytes. Raises OSError, EDQUOT beyond the limit, with nothing taken.

        The disk may be full all the same: then writing fails.
        """
        if self._closed:
            raise OSError(errno.EBADF, "the file is closed")
        size = aligned(nbytes)
        offset = self._free.take(size)
        assert offset is not None
        place = Extent(offset, nbytes)
        self.used += size
        if not self._resize():
            self.give(place)
            raise self._beyond_limit()
        return place

    def give(self, place: Extent) -> None:
        """Free `place`; the disk gets back what lies behind the last place. After `close` nothing is left."""
        if self._closed:
            return
        size = aligned(place.nbytes)
        self._free.give(place.offset, size)
        self.used -= size
        self._give_back()

    def part(self, place: Extent) -> FilePart:
        """The bytes of `place`."""
        return FilePart(self.file, place.offset, place.nbytes)

    def close(self) -> None:
        """Free the file once nobody reads it any more. Idempotent."""
        self.share.resize(self._length, 0)
        self._file, self._length, self._closed = None, 0, True

    def _give_back(self) -> None:
        """Give the disk what lies behind the last place."""
        self._resize()
        if self._file is not None and self._file.nbytes > self._length:
            shrink(self._file, self._length)

    def _beyond_limit(self) -> OSError:
        return OSError(errno.EDQUOT, f"the limit of {self.share.limit >> 20} MiB is reached")

    def _resize(self) -> bool:
        """Take the length that the file needs from the share; False if that is too much."""
        behind_all, _ = self._free.ranges()[-1]
        length = max(behind_all, self._reserved)
        if not self.share.resize(self._length, length):
            return False
        self._length = length
        return True


def aligned(nbytes: int) -> int:
    """Bytes that a place for `nbytes` bytes takes."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
