"""A step keeps more than fits into memory: the rest waits on the disk."""

import pytest

from hetpeer.bootstrap.audit import audit
from hetpeer.bootstrap.replay import run_reference
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

STEPS, IDS = 1, 160


async def test_what_a_step_keeps_goes_to_the_disk(swarm: Swarm) -> None:
    """And comes back from there: the next hop dies, and somebody else is sent all that it had been sent."""
    training = swarm.run.manifest.training.model_copy(update={"steps": STEPS, "batch_size": 2 * IDS})
    swarm.run = resign(swarm.run, training=training)
    bootstrap = await swarm.bootstrap()
    holder = swarm.volunteer("holder", before="little_memory", fail=f"send_gradient:{IDS - 10}")
    await holder.blocks()
    sender = swarm.volunteer("sender", before="little_memory")
    await swarm.gone(holder, within_s=60.0)
    assert "go to the disk" in sender.said
    newcomer = swarm.volunteer("newcomer", before="little_memory")
    await swarm.finished(bootstrap, sender, newcomer)
    assert not swarm.records("rollback")
    assert audit(swarm.run.path).leftovers > IDS // 2
    swarm.exact(run_reference(swarm.run.path, STEPS))
