"""A lock beside the key file, so that one process at a time uses an identity. The kernel drops it at exit.

The lock is on a file of its own, since the key file may be replaced. That file holds the owner's process id.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, LocalError

_MAX_PID_BYTES = 20


def hold(key: Path) -> int:
    """Lock the identity in the file `key`; it is held until the returned descriptor is closed.

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
    with suppress(OSError):  # a full disk: the lock holds, only the process id is missing
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def lock_of(key: Path) -> Path:
    """The lock file of `key`."""
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
    """` (pid 4711)`; empty if the file does not name a living process.

    It may not be written yet, be left from a process that was killed, or hold no number.
    """
    with suppress(OSError, OverflowError):
        with path.open("rb") as file:
            text = file.read(_MAX_PID_BYTES).strip()
        if text.isdigit() and _is_there(int(text)):
            return f" (pid {int(text)})"
    return ""


def _is_there(pid: int) -> bool:
    """Whether a process with this id exists. Raises `OSError`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return pid > 0
