"""Waiting for room on the disk of a reliable peer: at its start, and after something could not be saved."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import probe_room
from hetpeer.dht.base.errors import HetpeerError, LocalError
from hetpeer.dht.base.trouble_line import TroubleLine

START_BYTES = 1 << 20
"""Bytes that must be free before a reliable peer takes part: thousands of records of its log."""
LOOK_S = 2.0

_log = logging.getLogger(__name__)


class DiskWait:
    """The disk that has the run directory `folder`. One line says that it is full, one that it is not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._full = TroubleLine(_log, f"there is room to write {folder} again: the reliable peer goes on")

    @property
    def error(self) -> HetpeerError | None:
        """HP-DISK-002 while the reliable peer waits for room, else None."""
        return self._full.error

    async def until_room(self) -> None:
        """Return once START_BYTES can be written. Raises `LocalError` HP-DISK-001."""
        while True:
            try:
                await asyncio.to_thread(probe_room, self._folder, START_BYTES)
            except LocalError as error:
                self._full_or_raise(error)
                await asyncio.sleep(LOOK_S)
            else:
                self._full.ended()
                return

    async def after(self, failure: Exception) -> None:
        """Note that the disk is full if `failure` says so, and pause for LOOK_S. Raises any other failure."""
        self._full_or_raise(failure)
        await asyncio.sleep(LOOK_S)

    def _full_or_raise(self, failure: Exception) -> None:
        error = _no_room(failure)
        if error is None:
            raise failure
        self._full.lasts(error, f"the reliable peer waits for room: {error.line()}")


def _no_room(failure: BaseException) -> LocalError | None:
    """The error HP-DISK-002 that `failure` is, or has in its group; None if there is another one, too."""
    if isinstance(failure, BaseExceptionGroup):
        found = [_no_room(inner) for inner in failure.exceptions]
        return None if None in found else found[0]
    return failure if isinstance(failure, LocalError) and failure.code == "HP-DISK-002" else None
