"""A volunteer whose optimizer lies in the scratch file, beside one that has all in memory: equal bits."""

import os
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.swarm.child import until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
BLOCKS, MOMENTS, STEPS = 6, 2, 5


@pytest.mark.parametrize(("place", "each_step"), [("apply", BLOCKS), ("scratch_write", BLOCKS * MOMENTS)])
async def test_a_worker_killed_in_an_update_on_the_disk_loses_nothing(
    swarm: Swarm, place: str, each_step: int
) -> None:
    """It dies before an update, or while a moment is on its way to the disk. Its state is fetched again."""
    changes = {"steps": 100_000, "checkpoint_every": 10, "slot_size": 6}
    training = swarm.run.manifest.training.model_copy(update=changes)
    swarm.run = resign(swarm.run, layouts=(((0, BLOCKS),),), training=training)
    await swarm.bootstrap(together=2, before="patient")
    plain = swarm.volunteer("plain", before="polite")
    # A worker may write nowhere else (stages/worker/sandbox.py); the next worker finds the file there.
    died = Path(tempfile.gettempdir()) / f"hetpeer-worker-{os.getuid()}" / uuid.uuid4().hex
    fail = f"worker_{place}:{STEPS * each_step + 1}@{died}"
    filed = swarm.volunteer("filed", "--offload", "disk", fail=fail, before="polite")
    try:
        await filed.says("you are contributing")
        await until(lambda: swarm.lives(filed) == 2, "it is back")
        await swarm.left_in_order([plain, filed])
        assert died.exists()
    finally:
        died.unlink(missing_ok=True)
    assert "offload disk" in filed.said
    assert "offload none" in plain.said
    assert swarm.lives(plain) == 1
    swarm.exact_so_far()
