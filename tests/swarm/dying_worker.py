"""A volunteer whose worker dies at a chosen moment, beside a plain one: both hold all blocks."""

import os
import tempfile
import uuid
from pathlib import Path

from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm, resign

BLOCKS = 6


async def lose_a_worker(swarm: Swarm, name: str, *options: str, at: str) -> tuple[Child, Child]:
    """Train until a worker of volunteer `name` has died at the failpoint `at`, and the volunteer is back.

    Returns the plain volunteer and that one, both of which have left in order. `options` are those of `join`.
    """
    changes = {"steps": 100_000, "checkpoint_every": 10, "slot_size": 6}
    training = swarm.run.manifest.training.model_copy(update=changes)
    swarm.run = resign(swarm.run, layouts=(((0, BLOCKS),),), training=training)
    await swarm.bootstrap(together=2, before="patient")
    plain = swarm.volunteer("plain", before="polite")
    # A worker may write nowhere else (stages/worker/sandbox.py); the next worker finds the file there.
    died = Path(tempfile.gettempdir()) / f"hetpeer-worker-{os.getuid()}" / uuid.uuid4().hex
    hurt = swarm.volunteer(name, *options, fail=f"{at}@{died}", before="polite")
    try:
        await hurt.says("you are contributing")
        await until(lambda: swarm.lives(hurt) == 2, "it is back")
        await swarm.left_in_order([plain, hurt])
        assert died.exists()
    finally:
        died.unlink(missing_ok=True)
    assert swarm.lives(plain) == 1
    return plain, hurt
