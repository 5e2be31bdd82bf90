"""A volunteer with two devices, beside one with one device: equal bits."""

import os
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.swarm.child import until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
BLOCKS = 6
BACKWARDS = 20
"""After so many one of the two workers dies: in the fourth step or so."""


async def test_one_of_two_workers_killed_in_a_backward_loses_nothing(swarm: Swarm) -> None:
    """Its volunteer ends the other one too, and comes back with both."""
    changes = {"steps": 100_000, "checkpoint_every": 10, "slot_size": 6}
    training = swarm.run.manifest.training.model_copy(update=changes)
    swarm.run = resign(swarm.run, layouts=(((0, BLOCKS),),), training=training)
    await swarm.bootstrap(together=2, before="patient")
    plain = swarm.volunteer("plain", before="polite")
    # A worker may write nowhere else (stages/worker/sandbox.py); the next worker finds the file there.
    died = Path(tempfile.gettempdir()) / f"hetpeer-worker-{os.getuid()}" / uuid.uuid4().hex
    fail = f"worker_backward:{BACKWARDS}@{died}"
    divided = swarm.volunteer("divided", "--device", "cpu,cpu", fail=fail, before="polite")
    try:
        await divided.says("you are contributing")
        await until(lambda: swarm.lives(divided) == 2, "it is back")
        await swarm.left_in_order([plain, divided])
        assert died.exists()
    finally:
        died.unlink(missing_ok=True)
    assert divided.said.count("on 2 devices") == 2
    assert "computes on 1 processor core + 1 processor core" in divided.said
    assert swarm.lives(plain) == 1
    swarm.exact_so_far()
