"""The scratch file: vectors of a worker that lie on the disk (docs/memory.md).

The daemon makes it, without a name, in its home folder; the worker alone uses it. Nothing is mapped: what is
read and written counts for no memory limit, and a failing disk is an error and not a signal.
"""

from __future__ import annotations

import os

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.ipc.arena import FreeList

ALIGNMENT = 4096


class ScratchFile:
    """At most `limit` bytes of the file `descriptor`, which is empty.

    scratch = ScratchFile(descriptor, 8 << 30)
    place = scratch.take(4096)
    scratch.write(place, memoryview(bytes(4096)))
    scratch.give(place, 4096)
    """

    def __init__(self, descriptor: int, limit: int) -> None:
        self._descriptor = descriptor
        self._limit = limit
        self._free = FreeList(limit // ALIGNMENT * ALIGNMENT)
        self.used = 0
        """Bytes taken."""

    def take(self, nbytes: int) -> int:
        """Reserve `nbytes` bytes of undefined content on the disk; returns their offset.

        Raises `LocalError` HP-DISK-007, with nothing taken, if the limit or the disk has no room for them.
        """
        size = _aligned(nbytes)
        offset = self._free.take(size)
        if offset is None:
            raise _no_room(nbytes, f"the limit of {self._limit / 2**30:.1f} GiB is reached")
        try:
            os.posix_fallocate(self._descriptor, offset, size)
        except OSError as error:
            self._free.give(offset, size)
            raise _no_room(nbytes, error.strerror or str(error)) from error
        self.used += size
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Free what `take(nbytes)` returned. With nothing left in the file, the disk gets everything back."""
        self._free.give(offset, _aligned(nbytes))
        self.used -= _aligned(nbytes)
        if not self.used:
            os.ftruncate(self._descriptor, 0)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`. Raises `LocalError` HP-DISK-008."""
        rest = into
        while rest:
            try:
                count = os.preadv(self._descriptor, [rest], offset)
            except OSError as error:
                raise _failed("read", error.strerror or str(error)) from error
            if not count:
                raise _failed("read", "the file is cut short")
            offset, rest = offset + count, rest[count:]

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`. Raises `LocalError` HP-DISK-008."""
        rest = data
        while rest:
            try:
                count = os.pwrite(self._descriptor, rest, offset)
            except OSError as error:
                raise _failed("written", error.strerror or str(error)) from error
            offset, rest = offset + count, rest[count:]


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


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
