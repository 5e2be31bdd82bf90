"""An upgrade while a swarm trains: two versions in a row work together, and nothing is lost
(docs/protocol.md, "Versions").
"""

import signal

import pytest

from hetpeer.bootstrap.audit.replay import replay
from tests.swarm.child import Child
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
ENDLESS, SOME = 100_000, 2


@pytest.mark.proof
async def test_one_after_the_other_is_upgraded_and_no_step_is_lost(swarm: Swarm) -> None:
    """The reliable peer first, as docs/operations.md says, then the volunteers; each is killed, and
    started again as another version.
    """
    training = swarm.run.manifest.training.model_copy(update={"steps": ENDLESS, "checkpoint_every": 5})
    swarm.run = resign(swarm.run, training=training, layouts=(((0, 6),),))
    reliable = await swarm.bootstrap(together=3, before="previous_version")
    here = {name: swarm.volunteer(name, before="previous_version") for name in "ab"}
    here["c"] = swarm.volunteer("c")  # newer than its coordinator
    await swarm.committed(SOME)
    for version in ("", "next_version"):
        await reliable.kill()
        reliable = await swarm.bootstrap(before=version)
        await goes_on(swarm)
        for name in "ab":
            await here[name].kill()
            here[name] = swarm.volunteer(name, before=version)
            await goes_on(swarm, here[name])
    assert not swarm.records("rollback")
    assert not swarm.records("banned")
    assert not any("HP-RUN-002" in child.said for child in swarm.children)
    await swarm.stored(swarm.version)
    for child in (*here.values(), reliable):
        child.signal(signal.SIGINT)
        await child.ended()
    replayed = replay(swarm.run.path)  # at first nobody says in which order gradients were added
    assert replayed.ok, replayed.problems
    assert replayed.near + replayed.equal == swarm.judged().steps > 0


async def goes_on(swarm: Swarm, child: Child | None = None) -> None:
    """Some steps more, with `child`."""
    if child is not None:
        await child.says("you are contributing")
    await swarm.committed(swarm.version + SOME)
