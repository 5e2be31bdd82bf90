"""Check that this Python can carry hetpeer: no output if it can, else one line that says what is missing.

Runs on the Python that is being checked, so it keeps to syntax that old ones read.
"""

import importlib
import platform
import sys

OLDEST = (3, 11)
TOO_NEW = (3, 15)
"""The first version without wheels of what constraints.txt pins."""
COMPILED = ("ctypes", "ssl", "zlib")
"""Modules that a Python built from source lacks where their libraries were missing."""


def missing() -> str:
    """Return what keeps hetpeer from running here, and what to do about it; empty if nothing does."""
    version = "{}.{}".format(*sys.version_info[:2])
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        here = f"{sys.platform} on {platform.machine()}"
        return f"this is {here}, and hetpeer runs on Linux on x86-64 only: use such a machine"
    if not OLDEST <= sys.version_info[:2] < TOO_NEW:
        return (
            f"this is Python {version}, and hetpeer needs 3.11 to 3.14: apt-get install python3 python3-venv"
        )
    for name in COMPILED:
        try:
            importlib.import_module(name)
        except ImportError:
            return f"this Python {version} lacks {name}: install another one, or build it with {name}"
    try:
        importlib.import_module("ensurepip").version()
    except (ImportError, AttributeError):
        return (
            f"this Python {version} cannot make a virtual environment: apt-get install python{version}-venv"
        )
    return ""


if __name__ == "__main__":
    found = missing()
    if found:
        sys.exit(found)
