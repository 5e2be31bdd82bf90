"""The scratch file: vectors of a worker that lie on the disk (docs/memory.md).

The daemon makes it, without a name, in its home folder; the worker alone uses it. Nothing is mapped: what is
read and written counts for no memory limit, and a failing disk is an error and not a signal.
"""

from __future__ import annotations

import os

from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.file_pieces import FilePart, OpenFile, shrink
from hetpeer.stages.ipc.arena import FreeList
from hetpeer.stages.ipc.nameless_file import ALIGNMENT, aligned


class ScratchFile:
    """At most `limit` bytes of `file`, which is empty.

    scratch = ScratchFile(OpenFile.nameless(home), 8 << 30)
    place = scratch.take(4096)
    write(place, 0, memoryview(bytes(4096)))
    scratch.give(place)
    """

    def __init__(self, file: OpenFile, limit: int) -> None:
        self._file = file
        self.used = 0
        """Bytes taken."""
        self.keep_within(limit)

    def keep_within(self, limit: int) -> None:
        """Take at most `limit` bytes from now on. Raises ValueError if something is taken."""
        if self.used:
            raise ValueError(f"{self.used} bytes of the scratch file are taken")
        self._limit = limit
        self._free = FreeList(limit // ALIGNMENT * ALIGNMENT)

    def take(self, nbytes: int) -> FilePart:
        """Reserve `nbytes` bytes of undefined content on the disk.

        Raises `LocalError` HP-DISK-007, with nothing taken, if the limit or the disk has no room for them.
        """
        size = aligned(nbytes)
        offset = self._free.take(size)
        if offset is None:
            raise _no_room(nbytes, f"the limit of {self._limit / 2**30:.1f} GiB is reached")
        try:
            os.posix_fallocate(self._file.descriptor, offset, size)
        except OSError as error:
            self._free.give(offset, size)
            raise _no_room(nbytes, error.strerror or str(error)) from error
        self.used += size
        return FilePart(self._file, offset, nbytes)

    def give(self, part: FilePart) -> None:
        """Free what `take` returned. With nothing left in the file, the disk gets everything back."""
        self._free.give(part.offset, aligned(part.nbytes))
        self.used -= aligned(part.nbytes)
        if not self.used:
            shrink(self._file, 0)


def read(part: FilePart, begin: int, into: memoryview) -> None:
    """Fill `into` from byte `begin` of `part` on. Raises `LocalError` HP-DISK-008."""
    try:
        part.read_into(begin, into)
    except OSError as error:
        raise _failed("read", error.strerror or str(error)) from error


def write(part: FilePart, begin: int, data: memoryview) -> None:
    """Write `data` from byte `begin` of `part` on. Raises `LocalError` HP-DISK-008."""
    failpoints.reached("worker_scratch_write")
    try:
        part.write(begin, data)
    except OSError as error:
        raise _failed("written", error.strerror or str(error)) from error


def _no_room(nbytes: int, why: str) -> LocalError:
    return LocalError(
        "HP-DISK-007",
        f"the scratch file has no room for {nbytes / 2**20:.0f} MiB",
        why=why,
        fix="free some disk, allow more (--disk-limit), or keep more in memory (--offload)",
        exit_code=ExitCode.TOO_SMALL,
    )


def _failed(done: str, why: str) -> LocalError:
    return LocalError(
        "HP-DISK-008",
        f"the scratch file cannot be {done}",
        why=why,
        fix="look after the disk of hetpeer's home folder, or keep everything in memory (--offload none)",
        exit_code=ExitCode.TRY_LATER,
    )
