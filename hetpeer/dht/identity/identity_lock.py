"""One process at a time has an identity: a lock beside its key, which the kernel lets go of however the process ends.

The lock is on a file of its own, not on the key: a key may be replaced, and the file says who holds it.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, LocalError

_MAX_PID_BYTES = 20


def hold(key: Path) -> int:
    """Hold the identity in the file `key` until the descriptor that is returned is closed.

    Raises `LocalError` HP-ID-002 with the other process's id, HP-ID-001 where no lock can be made.
    """
    path = lock_of(key)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
    except BlockingIOError as error:
        raise in_use(key, path) from error
    except OSError as error:
        raise LocalError(
            "HP-ID-001",
            f"cannot lock the identity file {key}",
            why=f"{path}: {error.strerror}",
            fix="choose a folder that you can write to, on a disk that knows locks",
            exit_code=ExitCode.IDENTITY,
        ) from error
    with suppress(OSError):  # a full disk: the lock holds, it only does not say for whom
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def lock_of(key: Path) -> Path:
    """The file that who holds `key` has locked."""
    return key.with_name(f"{key.name}.lock")


def in_use(key: Path, lock: Path) -> LocalError:
    """HP-ID-002: another process, which has locked `lock`, runs with the identity in `key`."""
    return LocalError(
        "HP-ID-002",
        f"another process{_holder(lock_of(key))} runs with the identity {key}",
        why=f"it holds the lock {lock}",
        fix="end the other one, or give this one a home of its own (--home)",
        exit_code=ExitCode.IDENTITY,
    )


def _holder(path: Path) -> str:
    """` (pid 4711)`; empty in the moment before it has written that, when one that was killed did, and for what is no number."""
    with suppress(OSError, OverflowError):
        with path.open("rb") as file:
            text = file.read(_MAX_PID_BYTES).strip()
        if text.isdigit() and _is_there(int(text)):
            return f" (pid {int(text)})"
    return ""


def _is_there(pid: int) -> bool:
    """Whether a process has this id. Raises `OSError`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return pid > 0
