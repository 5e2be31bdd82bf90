"""hetpeer on a slower machine of its own: the same command line, whose compute workers have a part of a
processor each.

`python -m benchmarks.slowed 0.25 join …` (root; tests/wanlab/processors.py). The part counts from the
worker's warm-up on, which measures its speed: importing torch at a hundredth of a machine would take minutes.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from hetpeer.peer.cli.main import run
from hetpeer.peer.daemon import worker_start
from hetpeer.stages.ipc.compute import Compute
from tests.wanlab import processors
from tests.wanlab.processors import Processor

GROUPS = ("-t", "cgroup", "-o", "cpu"), ("-t", "cgroup2")
"""Control groups of both versions, as `mount` names them."""
PLACE = Path("/sys/fs/cgroup")
"""Where programs look for them, also the worker that measures its speed."""


def mount_groups() -> None:
    """Have the machine's control groups here, if this is a node of a laboratory: its /sys is its own."""
    if processors.FOLDER.exists():
        return
    mounts = (subprocess.run(["mount", *kind, "none", str(PLACE)], check=False) for kind in GROUPS)
    if not any(done.returncode == 0 for done in mounts):
        raise SystemExit("no control groups for processors can be mounted")
    processors.FOLDER = PLACE


def slow_down(cores: float) -> None:
    """Give each compute worker of this process so much of a processor, as soon as it has started.

    It shares that with nobody, which the boot's id would say.
    """
    start, boot = Compute.start, str(uuid.uuid4())
    worker_start.boot_id = lambda: boot

    async def slowed(*arguments: object, **named: object) -> Compute:
        compute = await start(*arguments, **named)  # type: ignore[arg-type]
        for child in psutil.Process().children(recursive=True):
            if any(part.endswith("worker_main") for part in child.cmdline()):
                Processor(child.pid, cores)
        return compute

    Compute.start = slowed  # type: ignore[method-assign]


if __name__ == "__main__":
    mount_groups()
    slow_down(float(sys.argv.pop(1)))
    run()
