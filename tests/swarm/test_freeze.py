"""A volunteer that is frozen longer than its lease, and thaws."""

import signal

import pytest

from hetpeer.bootstrap.replay import ReferenceRun
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def test_frozen_beyond_the_lease(swarm: Swarm, reference: ReferenceRun) -> None:
    """The run goes on without it; when it thaws it is fenced, comes back as a new incarnation and works again."""
    bootstrap = await swarm.bootstrap()
    volunteers = [swarm.volunteer(name) for name in "abcd"]
    for volunteer in volunteers:
        await volunteer.says("you are contributing", within_s=60.0)
    frozen = volunteers[3]
    frozen.signal(signal.SIGSTOP)
    before = swarm.version
    assert (await swarm.gone(frozen, within_s=20.0))["why"] in ("lease expired", "stream broken")
    frozen.signal(signal.SIGCONT)
    await frozen.says("fenced by the coordinator")
    await swarm.finished(bootstrap, *volunteers)
    assert before < 24
    assert 1 in swarm.incarnations(frozen)
    swarm.exact(reference)
