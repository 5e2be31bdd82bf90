"""A volunteer that is frozen longer than its lease, and thaws; and so does the coordinator."""

import asyncio
import signal

import pytest

from hetpeer.bootstrap.state.timeouts import MAX_TICK_S
from tests.swarm.child import until
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.mark.proof
async def test_frozen_beyond_the_lease(swarm: Swarm) -> None:
    """The run goes on without it; when it thaws it begins a new session and works again."""
    frozen, volunteers = await swarm.without_end(serves="")
    bootstrap, *_ = swarm.children
    await until(lambda: swarm.lives(frozen), "it has applied a step")
    frozen.signal(signal.SIGSTOP)
    version = swarm.version
    given_up = await swarm.gone(frozen, within_s=100.0)
    assert given_up["why"] in ("lease expired", "stream broken")
    assert given_up["version"] <= version + 1, (
        "the step that it had voted on may have been committed, and no other"
    )
    await swarm.committed(given_up["version"] + 3)
    before = len(bootstrap.said)
    frozen.signal(signal.SIGCONT)
    await frozen.says("new session with the coordinator")
    await until(lambda: "3 volunteers" in bootstrap.said[before:], "it is let in again")
    bootstrap.signal(signal.SIGSTOP)
    await asyncio.sleep(2 * MAX_TICK_S)  # so long is it frozen itself
    bootstrap.signal(signal.SIGCONT)
    await bootstrap.says("this process stood still")
    applied = swarm.updates(frozen)
    await until(lambda: swarm.updates(frozen) > applied, "it works again", 100.0)
    assert swarm.lives(frozen) == 1
    await swarm.left_in_order(volunteers)
    swarm.exact_so_far()
