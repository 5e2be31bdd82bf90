"""Bytes that all volunteers' logs together may take on a coordinator's disk.

The coordinator's log and the checkpoints must go on when evidence cannot: the volunteers' logs take a quarter
of what they and the free space come to, and never the last gigabyte.
"""

from __future__ import annotations

import os
from pathlib import Path

SHARE = 4
"""Volunteers' logs take one part in SHARE of the space that they and the rest of the disk have."""
RESERVE = 1 << 30
"""Bytes of free space that evidence never takes."""


def free_bytes(folder: Path) -> int:
    """Free space for this user on the disk of `folder`, or of the nearest folder above that exists."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


class EvidenceRoom:
    """Room for the files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken = sum(path.stat().st_size for path in folder.glob("*.jsonl")) if folder.exists() else 0

    def has(self, nbytes: int) -> bool:
        """Whether another `nbytes` have room."""
        left = free_bytes(self._folder) - RESERVE - nbytes
        return left >= 0 and (self._taken + nbytes) * SHARE <= self._taken + left + nbytes

    def took(self, nbytes: int) -> None:
        """Note that the files grew by `nbytes`."""
        self._taken += nbytes
