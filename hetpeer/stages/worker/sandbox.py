"""The worker's sandbox: it gives up the network, other files and other processes before it loads anything.

The worker runs graphs from the net. They can name allow-listed operators only (docs/graph.md). Should one of
those have a hole, its exploiter is in a process that can read Python's libraries and use the GPU, compute,
and answer through the one inherited socket. Landlock (Salaün, 2021) blocks files, TCP, and signals to others.
seccomp blocks sockets, except for one kind without which CUDA does not start, and connecting any. Both need
no privilege, cover all child processes, and cannot be undone.

The filter of seccomp is made here: PyPI has a package untouched since 2021.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import stat
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EACCES
from functools import partial
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, SOCK_STREAM
from typing import NamedTuple

from hetpeer.dht.base import landlock

_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/opt", "/sys", "/etc/ld.so.cache", "/etc/localtime"),
    *(
        f"/proc/{name}"
        for name in (
            "self",
            "cpuinfo",
            "meminfo",
            "stat",
            "version",
            "devices",
            "filesystems",
            "driver",
            "sys",
        )
    ),
)
"""Readable paths; under /proc only the worker's own part and the machine's, not other processes."""

_THREADS = Path("/proc/self/task")
"""CUDA's driver names its threads through files here, or does not start. All are the worker's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """Constants of a machine type: its audit name and the numbers of its system calls."""

    audit: int
    seccomp: int
    socket: int
    socketpair: int
    connect: int


_MACHINES = {
    "x86_64": _Calls(audit=0xC000003E, seccomp=317, socket=41, socketpair=53, connect=42),
    "aarch64": _Calls(audit=0xC00000B7, seccomp=277, socket=198, socketpair=199, connect=203),
}
_SET_FILTER = 1
_IO_URING_SETUP, _X32 = 425, 0x40000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | EACCES
_NUMBER, _MACHINE, _FIRST, _SECOND = 0, 4, 16, 24
"""Offsets in a filter's data: call number, machine, and lower halves of the first two arguments."""
_STEP = struct.Struct("HBBI")
_KIND = 0xF
"""Mask of the socket type; the other bits are flags."""


def confine(also: Sequence[Path] = ()) -> list[str]:
    """Enter the sandbox, with all later child processes. Returns a line for each thing that could not be
    given up.

    `also`: folders that stay readable. Call it while there is one thread: others would keep their rights.
    With `HETPEER_SANDBOX` set to `off` nothing changes.
    """
    if os.environ.get(landlock.VARIABLE) == "off":
        return [f"it may do what its user may: {landlock.VARIABLE} is off"]
    landlock.no_new_privileges()
    left = []
    for step, what in (
        (partial(_confine_files, also), "it can read and write its user's files"),
        (_confine_sockets, "it can reach the network"),
    ):
        try:
            step()
        except OSError as error:
            left.append(f"{what}: {error.strerror}")
    return left


# ── Landlock ───────────────────────────────────────────────────────────────────────────────────────────────


def _confine_files(also: Sequence[Path]) -> None:
    """Allow reading of Python, the scratch folder and the devices; forbid other files, TCP and signals."""
    allowed = [(path, landlock.READ) for path in (*readable(), *(path for path in also if path.exists()))]
    allowed.append((scratch(), landlock.CHANGE))
    device = landlock.READ_FILE | landlock.WRITE_FILE | landlock.IOCTL | landlock.READ_DIR
    allowed += [(path, device) for path in devices()]
    if _THREADS.exists():
        names = landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE | landlock.READ_DIR
        allowed.append((_THREADS, names))
    rules = landlock.ruleset(allowed, tcp=False, others=False)
    try:
        landlock.enter(rules)
    finally:
        os.close(rules)


def readable() -> list[Path]:
    """Paths of Python, torch and their libraries, and the kernel's description of the machine."""
    system = {path.resolve() for path in map(Path, _SYSTEM) if path.exists()}
    return sorted({*landlock.python_paths(Path(__file__).resolve().parents[2]), *system})


SCRATCH_BYTES = 1 << 28
"""Bytes of caches in the scratch folder beyond which a worker that starts alone empties it."""
_in_use: dict[Path, int] = {}
"""Scratch folder → descriptor that holds its lock while this process lives."""


def scratch() -> Path:
    """The only writable folder; torch makes caches there at import. A user's workers share it; other users
    cannot use it. If it has more than SCRATCH_BYTES and no living worker uses it, it is emptied.

    Raises OSError, also if another user made it.
    """
    folder = Path(tempfile.gettempdir()) / f"hetpeer-worker-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(0, f"{folder} is not its own")
    tempfile.tempdir = str(folder)
    _empty_if_full(folder)
    return folder


def _empty_if_full(folder: Path) -> None:
    """Empty `folder` if it is too large, unless another worker uses it; lock it as long as we live."""
    if folder in _in_use:
        return
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    _in_use[folder] = lock
    with suppress(OSError):  # another worker uses it, or the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        if sum(path.lstat().st_size for path in found) > SCRATCH_BYTES:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)


def devices() -> list[Path]:
    """GPUs and the standard devices."""
    names = ("null", "zero", "urandom", "random", "kfd", "dri")
    found = [Path("/dev") / name for name in names]
    found += Path("/dev").glob("nvidia*")
    return [path for path in found if path.exists()]


# ── seccomp ────────────────────────────────────────────────────────────────────────────────────────────────


class _FilterStep(NamedTuple):
    """One instruction of a classic packet filter.

    A comparison continues at the label `then` or `otherwise`, by default with the next instruction.
    """

    code: int
    value: int
    then: str = ""
    otherwise: str = ""
    label: str = ""


def _confine_sockets() -> None:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(0, f"hetpeer does not know the system calls of {machine}")
    calls = _MACHINES[machine]
    program = _assembled(_filter(calls))
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // _STEP.size, ctypes.addressof(code))
    landlock.call(calls.seccomp, _SET_FILTER, 0, header)


def _filter(calls: _Calls) -> list[_FilterStep]:
    """EACCES for foreign calling conventions, for connecting, and for all sockets but one harmless kind.

    CUDA binds a SOCK_SEQPACKET unix socket to an abstract name of its own (`cuda-uvmfd-…`), and does not
    start if it cannot. Unconnected, it reaches nobody: Landlock prevents binding a path, and connecting to
    abstract names of other processes. Of socket pairs only connected kinds are allowed: a datagram's address
    could reach others.
    """
    unreachable = (_IO_URING_SETUP, calls.connect)
    return [
        _FilterStep(_LOAD, _MACHINE),
        _FilterStep(_EQUAL, calls.audit, otherwise="refuse"),
        _FilterStep(_LOAD, _NUMBER),
        _FilterStep(_AT_LEAST, _X32, then="refuse"),
        *(_FilterStep(_EQUAL, number, then="refuse") for number in unreachable),
        _FilterStep(_EQUAL, calls.socketpair, then="pair"),
        _FilterStep(_EQUAL, calls.socket, otherwise="allow"),
        _FilterStep(_LOAD, _FIRST),
        _FilterStep(_EQUAL, AF_UNIX, otherwise="refuse"),
        _FilterStep(_LOAD, _SECOND),
        _FilterStep(_AND, _KIND),
        _FilterStep(_EQUAL, SOCK_SEQPACKET, then="allow", otherwise="refuse"),
        _FilterStep(_LOAD, _SECOND, label="pair"),
        _FilterStep(_AND, _KIND),
        _FilterStep(_EQUAL, SOCK_STREAM, then="allow"),
        _FilterStep(_EQUAL, SOCK_SEQPACKET, then="allow", otherwise="refuse"),
        _FilterStep(_RETURN, _ALLOW, label="allow"),
        _FilterStep(_RETURN, _REFUSE, label="refuse"),
    ]


def _assembled(steps: Sequence[_FilterStep]) -> bytes:
    """The filter as an array of the kernel's `struct sock_filter`, labels replaced by jump distances."""
    index_of = {step.label: index for index, step in enumerate(steps) if step.label}

    def distance(index: int, label: str) -> int:
        """Instructions to skip from `index` to `label`; 0, the next instruction, without a label."""
        return index_of[label] - index - 1 if label else 0

    return b"".join(
        _STEP.pack(step.code, distance(index, step.then), distance(index, step.otherwise), step.value)
        for index, step in enumerate(steps)
    )
