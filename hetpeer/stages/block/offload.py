"""Kinds of offload: where a block keeps what only its update needs (docs/memory.md).

HPS keeps the optimizer's state in main memory (HPS, section 4.4); here it may also lie in a file.
"""

from __future__ import annotations

import enum


class Offload(enum.StrEnum):
    """A block's kind of offload. It changes where numbers lie, and no number."""

    NONE = "none"
    """Everything is on the device."""
    HOST = "host"
    """Weights and gradient are on the device, everything else is in main memory."""
    DISK = "disk"
    """Weights and gradient are on the device, one slot is in main memory, everything else in a file."""
