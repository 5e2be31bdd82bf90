"""Checkpoints of a run that is going on, as they come, for exports one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.record_log import in_use, read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory

LOOK_S = 2.0
"""Seconds between two looks at the log."""


def checkpoints(directory: Path, every: int, pause: Callable[[float], None] = time.sleep) -> Iterator[int]:
    """Versions of the newest checkpoint: the first one of each `every` updates, and the last one.

    Waits while a process serves the run, and ends when none does. Raises `LocalError` HP-RUN-*, HP-LOG-001.
    """
    run = RunDirectory.open(directory)
    before = 0
    while True:
        served = in_use(run.log_path)  # asked first: a checkpoint of its last moment is seen below
        version = History.of(read_log(run.log_path), whole=False).checkpoint_version
        if version // every > before // every or (version > before and not served):
            before = version
            yield version
        elif not served:
            return
        else:
            pause(LOOK_S)
