"""Return of freed memory that malloc keeps to the system (docs/limits.md, "RAM").

Tensors of less than 32 MiB lie in malloc's heap, where pages stay for the next tensor (ipc/worker_process.py,
MALLOC). After a large change of what is held they would be counted for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Return all free pages of the heap (malloc_trim(3)). Does nothing without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
