"""A part of benchmarks.gpu: a real swarm whose volunteers compute on different devices. One is killed, and
what comes of it is one machine's run on a CPU.

Two stages with two holders each; one of the four computes on the CPU, so the same sums come from both kinds
of device and holders of both kinds agree on the bits of each update.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.swarm import Model, make_run, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.run.settings import TrainingSettings

STEPS, KILLED_AT = 16, 5
ON_CPU = 4
"""The volunteer that has no GPU."""
WITHIN_S = 240.0
UNCONFINED = "less confined"
TRAINING = TrainingSettings(
    steps=STEPS,
    batch_size=16,
    microbatch_size=4,
    eval_every=4,
    eval_microbatches=2,
    checkpoint_every=STEPS,
)


async def train(device: str, seed: int) -> dict[str, Any]:
    """One row of benchmarks.gpu. Raises TimeoutError, and `LocalError` HP-DEMO-003 when a process fails."""
    with tempfile.TemporaryDirectory(prefix="hetpeer-") as name:
        folder = Path(name)
        run = make_run(folder, Model(), 2, TRAINING, seed)
        async with running(run, folder, 0) as swarm:
            for number in (1, 2, 3, ON_CPU):
                await swarm.add(number, "--device", "cpu" if number == ON_CPU else device)
            await swarm.until(KILLED_AT, WITHIN_S)
            swarm.at_liberty.add(1)
            await swarm.kill(1)
            await swarm.finished((2, 3, ON_CPU), WITHIN_S)
            said = {number: swarm.said(number).splitlines() for number in swarm.volunteers}
        verdict = audit(run.path)
        replayed = replay(run.path)
    unconfined = {line for lines in said.values() for line in lines if UNCONFINED in line}
    exact = verdict.ok and replayed.ok and replayed.steps == STEPS
    return {
        "steps": replayed.steps,
        "problems": [*verdict.problems, *replayed.problems],
        "near": replayed.near,
        "farthest": replayed.farthest,
        "bound": replayed.bound,
        "unconfined": sorted(unconfined),
        "met": exact,
    }
