"""A volunteer that is frozen longer than its lease, and thaws; and so does the coordinator."""

import asyncio
import signal

import pytest

from hetpeer.bootstrap.leases import MAX_TICK_S
from hetpeer.bootstrap.replay import ReferenceRun
from tests.swarm.swarm import Swarm, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def test_frozen_beyond_the_lease(swarm: Swarm, reference: ReferenceRun) -> None:
    """The run goes on without it; when it thaws it is fenced, comes back as a new incarnation and works again."""
    bootstrap = await swarm.bootstrap()
    volunteers = [swarm.volunteer(name) for name in "abc"]
    await swarm.committed(1)
    worker = next(v for v in volunteers if swarm.lives(v)).helpers()["worker"]
    worker.suspend()  # the run is not over before the third one is in
    places = [await volunteer.blocks() for volunteer in volunteers]
    worker.resume()
    for volunteer in volunteers:
        await volunteer.says("you are contributing")
    frozen = next(v for v, place in zip(volunteers, places, strict=True) if places.count(place) == 2)
    alone = next(v for v, place in zip(volunteers, places, strict=True) if places.count(place) == 1)
    sole = alone.helpers()["worker"]
    await until(lambda: swarm.lives(frozen), "it has applied a step")
    frozen.signal(signal.SIGSTOP)
    version = swarm.version
    given_up = await swarm.gone(frozen, within_s=20.0)
    assert given_up["why"] in ("lease expired", "stream broken")
    assert given_up["version"] <= version + 1, (
        "the step that it had voted on may have been committed, and no other"
    )
    sole.suspend()  # nor is it over before the frozen one is back
    before = len(bootstrap.said)
    frozen.signal(signal.SIGCONT)
    await frozen.says("fenced by the coordinator")
    await until(lambda: "3 volunteers" in bootstrap.said[before:], "it is let in again")
    bootstrap.signal(signal.SIGSTOP)
    await asyncio.sleep(2 * MAX_TICK_S)  # so long is it frozen itself
    bootstrap.signal(signal.SIGCONT)
    await bootstrap.says("this process stood still")
    sole.resume()
    await swarm.finished(bootstrap, *volunteers)
    assert swarm.lives(frozen) == 2
    swarm.exact(reference)
