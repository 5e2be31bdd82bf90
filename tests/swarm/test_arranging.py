"""Blocks change hands while real volunteers train: those who are left take over what nobody comes for, and
the curve stays that of one machine.
"""

import pytest

from tests.swarm.child import until
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def test_who_is_left_takes_over_what_nobody_comes_for(swarm: Swarm) -> None:
    bootstrap = await swarm.bootstrap(before="soon_calm")
    one, other = swarm.volunteer("one"), swarm.volunteer("other", fail="tell_vote:3")
    await other.ended(100.0)
    await swarm.gone(other)
    await until(lambda: swarm.records("arranged"), "blocks move to other volunteers", 100.0)
    await swarm.finished(bootstrap, one)
    assert "blocks move to other volunteers" in bootstrap.said
    swarm.exact()


@pytest.mark.proof
@pytest.mark.parametrize(
    "place",
    [
        pytest.param("record_arranged:1", marks=pytest.mark.grid),
        "recorded_arranged:1",
        pytest.param("send_granted:3", marks=pytest.mark.grid),
    ],
)
async def test_a_coordinator_that_dies_while_it_moves_somebody(swarm: Swarm, place: str) -> None:
    """What is in the log is in effect; who was not told finds out when it comes back.

    The first two places are given to those who come.
    """
    await swarm.bootstrap(before="soon_calm", fail=place)
    one = swarm.volunteer("one")
    swarm.volunteer("other", fail="tell_vote:3")
    await until(lambda: swarm.deaths == 2, "the coordinator has died", 200.0)
    assert place.startswith("record_") or swarm.records("arranged")
    bootstrap = await swarm.bootstrap(before="soon_calm")
    await swarm.finished(bootstrap, one)
    swarm.exact()
