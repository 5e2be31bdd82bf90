"""Child processes that end with this process, even after `kill -9`."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# looked up before any fork: a child must not take the loader's lock
_libc = ctypes.CDLL(None, use_errno=True)


def dying_with_us() -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel kills the child when the thread that starts it ends.

    Start such children from the main thread. The function makes two system calls and takes no lock, so it is
    safe after a fork.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the prctl above
            os._exit(1)

    return die_with_parent
