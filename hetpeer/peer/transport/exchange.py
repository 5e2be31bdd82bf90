"""States in the exchange file, between the compute worker and other peers (docs/memory.md).

A state stays in the file as long as somebody uses it: the worker that reads or writes it, the order for a
checkpoint, each peer that it is sent to. With the last one its place is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.file_pieces import FilePart
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.nameless_file import NamelessFile, aligned


class StateRoomError(LocalError):
    """There is no room for a state in the exchange file now; `ever`: there may be later."""

    def __init__(self, nbytes: int, limit: int, error: OSError) -> None:
        self.ever = nbytes <= limit
        super().__init__(
            "HP-DISK-010",
            f"no room on the disk for a state of {nbytes / 2**20:,.1f} MiB on its way",
            why=error.strerror or str(error),
            fix="allow more (hetpeer config set limits.disk 20GiB), or free some space",
            exit_code=ExitCode.TOO_SMALL,
        )


def reserve_copies(exchange: NamelessFile, sizes: Iterable[int]) -> None:
    """Have the disk keep room for one copy of each of our states, of at most `sizes` bytes.

    A checkpoint needs all copies at a time, also the last, with which a volunteer without room on its disk
    hands over what nobody else holds. Raises `StateRoomError`; then checkpoints may fail.
    """
    needed = sum(map(aligned, sizes))
    try:
        exchange.reserve(needed)
    except OSError as error:
        raise StateRoomError(needed, exchange.share.limit, error) from error


class PassingState:
    """A state in the exchange file, with one user at first; as a target of a download it has no room yet."""

    def __init__(self, exchange: NamelessFile) -> None:
        self._exchange = exchange
        self._users = 1
        self._place: Extent | None = None

    def begin(self, nbytes: int) -> None:
        """Take room for `nbytes` bytes, in place of what was there. Raises `StateRoomError`."""
        self._free()
        try:
            self._place = self._exchange.take(nbytes)
        except OSError as error:
            raise StateRoomError(nbytes, self._exchange.share.limit, error) from error

    def write(self, begin: int, data: Any) -> None:
        """Write the buffer `data` from byte `begin` on. Raises `StateRoomError`."""
        place = self.extent
        try:
            self._exchange.part(place).write(begin, data)
        except OSError as error:
            raise StateRoomError(place.nbytes, self._exchange.share.limit, error) from error

    @property
    def extent(self) -> Extent:
        """Its place in the exchange file."""
        assert self._place is not None
        return self._place

    def part(self, nbytes: int) -> FilePart:
        """Its first `nbytes` bytes, valid as long as there is a user. Raises OSError without a worker."""
        return self._exchange.part(Extent(self.extent.offset, nbytes))

    def use(self) -> PassingState:
        """The same with one more user, who calls `drop`."""
        self._users += 1
        return self

    def drop(self) -> None:
        """Take a user away; with the last one the place is free."""
        self._users -= 1
        if not self._users:
            self._free()

    def _free(self) -> None:
        if self._place is not None:
            self._exchange.give(self._place)
            self._place = None
