"""A step keeps more than fits into memory: the rest waits on the disk."""

import pytest

from hetpeer.bootstrap.replay import run_reference
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

STEPS = 3


async def test_what_a_step_keeps_goes_to_the_disk(swarm: Swarm) -> None:
    """Also what is sent again from there, when the next stage dies."""
    training = swarm.run.manifest.training.model_copy(update={"steps": STEPS, "batch_size": 240})
    swarm.run = resign(swarm.run, training=training)
    bootstrap = await swarm.bootstrap()
    volunteers = [swarm.volunteer(name, before="little_memory") for name in ("one", "other")]
    spare = swarm.volunteer("spare", before="little_memory", fail="send_gradient:150")
    await swarm.finished(bootstrap, *volunteers, within_s=90.0)
    assert [v for v in volunteers if "go to the disk" in v.said]
    assert spare.status is None or spare.status < 0
    swarm.exact(run_reference(swarm.run.path, STEPS))
