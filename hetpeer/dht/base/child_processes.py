"""Children that never outlive us, however we end: `kill -9` included."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # looked up before any fork: a child may not take the loader's lock


def dying_with_us() -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel kills the child when the thread that starts it ends.

    Start such children from the main thread. It makes two system calls and takes no lock, so it is safe after a fork.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return die_with_parent
