"""Processor cores that a daemon and all of its children may use. The kernel enforces it, and children inherit
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

ALLOWED = frozenset(os.sched_getaffinity(0))
"""Cores that this process had at its start."""


def chosen(count: int, allowed: frozenset[int] = ALLOWED) -> frozenset[int]:
    """`count` of the cores, all for 0. The last ones: interrupts mostly go to the first. Pure."""
    return frozenset(sorted(allowed)[-count:]) if count else allowed


def restrict(count: int) -> None:
    """Have this process and all of its children, with every thread of them, use so many cores; 0: all."""
    cores = chosen(count)
    done: set[int] = set()
    while new := set(_threads()) - done:  # a thread that was just made may have come from one not yet done
        for thread in new:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
        done |= new


def _threads() -> Iterator[int]:
    """All threads of this process and its children."""
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield from (int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir())
