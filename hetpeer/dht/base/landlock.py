"""Landlock (Salaün, 2021): a process gives up files, TCP and signals to others, for itself and its children.

It needs no privilege and cannot be undone. The system calls are made here: PyPI has an alpha that knows files
only.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

VARIABLE: Final = "HETPEER_SANDBOX"
"""`off` confines no process: for a driver that does not work in the sandbox."""

_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_QUERY_ABI = 1
_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL = 1 << 14, 1 << 15
READ: Final = READ_FILE | READ_DIR | EXECUTE
"""Rights to read files and folders, and to run programs."""
CHANGE: Final = ((1 << 16) - 1) & ~EXECUTE
"""All rights but to run programs."""
_FILES = {1: (1 << 13) - 1, 2: 1 << 13, 3: TRUNCATE, 5: IOCTL}
"""First ABI of Landlock → rights on files that it knows."""
_NETWORK_ABI, _TCP = 4, 0b11
_SCOPE_ABI, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 0b11

Allowed = tuple[Path, int]
"""A file or folder, and the rights on it and on all below it."""

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Version of this kernel's Landlock. Raises OSError if it has none."""
    return call(_CREATE_RULESET, None, 0, _QUERY_ABI)


def ruleset(allowed: Iterable[Allowed], *, tcp: bool, others: bool) -> int:
    """Descriptor of a set of rules: nothing but what is `allowed`. Raises OSError. The caller closes it.

    `tcp`: whether TCP stays allowed; `others`: signals to other processes, and their abstract Unix sockets.
    """
    version = abi()
    files = sum(rights for since, rights in _FILES.items() if version >= since)
    network = _TCP if version >= _NETWORK_ABI and not tcp else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPE_ABI and not others else 0
    size = 24 if version >= _SCOPE_ABI else 16 if version >= _NETWORK_ABI else 8
    rules = call(_CREATE_RULESET, struct.pack("QQQ", files, network, scope), size, 0)
    try:
        for path, rights in allowed:
            _allow(rules, path, rights & files)
    except BaseException:
        os.close(rules)
        raise
    return rules


def enter(rules: int) -> None:
    """Put `rules` in force for this thread and all that it starts. Raises OSError. Safe after a fork."""
    no_new_privileges()
    call(_RESTRICT_SELF, rules, 0)


def no_new_privileges() -> None:
    """Gain no privileges any more by running a program; the kernel asks for that first."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def python_paths(package: Path) -> list[Path]:
    """Paths of Python, of `package` and of all that it may import; never a home as a whole."""
    installed = {Path(path) for path in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())}
    # A checkout is on the path as a whole, and may have run directories with keys beside the package.
    imported = {Path(path) for path in sys.path if path and Path(path).resolve() != package.parent}
    found = {path.resolve() for path in (*installed, *imported, package) if path.exists()}
    # Homes are never readable as a whole, even if Python is installed right in one.
    return sorted(found - {Path("/"), Path("/home"), Path("/root"), Path.home().resolve()})


def _allow(rules: int, path: Path, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not path.is_dir():
            rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
        call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


def call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call. Raises OSError."""
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a or 0) for a in arguments]
    found = _libc.syscall(ctypes.c_long(number), *words)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
