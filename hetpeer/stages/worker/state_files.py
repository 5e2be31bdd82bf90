"""States that pass between daemon and worker: files in the exchange file, read and written piece by piece.

The daemon decides what lies where in it (ipc/nameless_file.py); its descriptor is inherited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.base.file_pieces import FilePart, OpenFile
from hetpeer.stages.block.block_state import Layout, State
from hetpeer.stages.block.state_file import StateFile, write_state
from hetpeer.stages.ipc.arena import Extent


class StateFiles:
    """The exchange file as the worker uses it.

    files = StateFiles(OpenFile(options.exchange))
    with files.in_use():
        state = files.open(extent, 2, layout_of(spec), rules.keeps)
        nbytes = files.dump(extent, state, 2, layout_of(spec))
    """

    def __init__(self, exchange: OpenFile) -> None:
        self._exchange = exchange

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which states are read and written. Raises `LocalError` HP-DISK-009."""
        try:
            yield
        except OSError as error:
            raise _unusable(error) from error

    def open(self, extent: Extent, block: int, layout: Layout, kept: Sequence[str]) -> StateFile:
        """The state of `block` in the file at `extent`, to be read in pieces. Raises as `StateFile`."""
        return StateFile(self._part(extent), block, layout, kept)

    def dump(self, extent: Extent, state: State, block: int, layout: Layout) -> int:
        """Write a state file to `extent`; returns its length in bytes. Raises OSError."""
        return write_state(self._part(extent), state, block, layout)

    def _part(self, extent: Extent) -> FilePart:
        return FilePart(self._exchange, extent.offset, extent.nbytes)


def _unusable(error: OSError) -> LocalError:
    return LocalError(
        "HP-DISK-009",
        "a state on its way to or from the compute worker is lost",
        why=f"the file in hetpeer's home that it passes through: {error.strerror or error}",
        fix="nothing: it is tried again; if that stays, look at the disk",
    )
