"""A command of hetpeer in a process of its own, and all that it took: imports, threads and what it
compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from resource import struct_rusage
from typing import Any


def counted(*arguments: str) -> tuple[Any, struct_rusage]:
    """The object that `hetpeer *arguments` prints with `--json`, and what its process used.

    Raises SystemExit if it fails.
    """
    command: Sequence[str] = (sys.executable, "-m", "hetpeer.peer.cli.main", *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"hetpeer {' '.join(arguments)} ended with {process.returncode}")
    return json.loads(said), usage


def cpu_s(usage: struct_rusage) -> float:
    """Processor seconds of all its threads, in the kernel and outside."""
    return usage.ru_utime + usage.ru_stime
