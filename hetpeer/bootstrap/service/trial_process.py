"""Entry of the process that computes one microbatch: `python -m … DIR BATCH ID`.

The record of the checkpoint comes on stdin as JSON, the finding goes to stdout as JSON: [why, samples], or
null. The graph runs in the sandbox of the compute worker.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import HetpeerError
from hetpeer.stages.worker.sandbox import confine


def main(arguments: list[str]) -> int:
    """Compute the microbatch. Returns the exit status: not 0 if this machine cannot try."""
    directory, batch, number = arguments
    record = json.load(sys.stdin)
    os.nice(10)
    try:
        run = RunDirectory.open(Path(directory))
        confine([run.path / "graph", run.path / "state", run.data, run.checkpoints])

        import torch

        from hetpeer.bootstrap.service.microbatch_trial import MicrobatchTrial

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
        print(json.dumps(MicrobatchTrial(run, record).find(int(batch), int(number))))
    except HetpeerError as error:
        print(error.line(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
