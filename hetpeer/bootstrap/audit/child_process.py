"""Child processes of the audit: modules that compute with torch. The audit itself has no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hetpeer.dht.base.runtime import dying_with_us

SPARING = {"OMP_WAIT_POLICY": "passive"}
"""Spinning threads are slow on a machine with other load."""


def run_child(
    module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run `python -m module *arguments`; returns its exit status and what it wrote on stderr.

    `environment`: variables in addition to ours. The child dies with this process.
    """
    finished = subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        env=os.environ
        | SPARING
        | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        | dict(environment or {}),
        preexec_fn=dying_with_us(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return finished.returncode, finished.stderr
