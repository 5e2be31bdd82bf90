"""A nameless file for tensors that must be kept and do not fit into memory: nothing is left of it, whatever
happens.

It is written and read on the loop: a bundle is a few megabytes in the system's page cache. A tensor that the
file has no room for is refused, and stays in memory.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.nameless_file import DiskShare, NamelessFile

_log = logging.getLogger(__name__)


class SpillFile:
    """Tensors in a nameless file on the disk of `folder`, within `share`."""

    def __init__(self, folder: Path, share: DiskShare) -> None:
        self._folder = folder
        self._file = NamelessFile(folder, share)
        self.refusal = ""
        """Reason of the last refusal, until the file is empty again."""
        self._said = False
        self._told: set[str] = set()
        """Reasons of refusals that were logged: each step may have some."""

    @property
    def used(self) -> int:
        """Bytes of the file that are taken."""
        return self._file.used

    def put(self, data: memoryview) -> Extent | None:
        """Keep a copy of `data`; None if there is no room for it, on the disk or within the limit."""
        try:
            place = self._file.take(len(data))
        except OSError as error:
            self._refuse(error)
            return None
        try:
            self._file.part(place).write(0, data)
        except OSError as error:
            self._file.give(place)
            self._refuse(error)
            return None
        if not self._said:
            self._said = True
            _log.info("memory is full: tensors that are kept for others go to the disk at %s", self._folder)
        return place

    def get(self, place: Extent, into: memoryview) -> None:
        """Copy what lies at `place` into `into`, of the same length."""
        self._file.part(place).read_into(0, into)

    def drop(self, place: Extent) -> None:
        """Free `place`. With nothing left in the file, the disk gets everything back."""
        self._file.give(place)
        if not self.used:
            self.refusal = ""

    def close(self) -> None:
        """Free the file and everything in it. Idempotent."""
        self._file.close()

    def _refuse(self, error: OSError) -> None:
        why = error.strerror or str(error)
        self.refusal = self.refusal or why
        if why not in self._told:
            self._told.add(why)
            _log.warning("memory is full, and so is what there is of the disk: %s", why)
