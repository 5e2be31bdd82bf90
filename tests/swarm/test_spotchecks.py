"""Real volunteers whose numbers are checked by others (docs/trust.md)."""

import pytest

from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.run.settings import TrustSettings
from tests.amounts import mostly_proof
from tests.swarm.fitted import STEPS, fitted_run
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
ALWAYS = TrustSettings(spot_checks=1.0)


@pytest.mark.parametrize("wrong", mostly_proof(["sends_opposite", "sends_stale"], ["sends_stale"]))
async def test_who_sends_other_sums_than_its_own_is_banned_and_nothing_of_it_counts(
    swarm: Swarm, wrong: str
) -> None:
    swarm.run = resign(swarm.run, trust=ALWAYS, layouts=(((0, 6),),))
    bootstrap = await swarm.bootstrap(together=4, before="even_handed")
    honest = [swarm.volunteer(name) for name in "abc"]
    liar = swarm.volunteer("d", before=wrong)
    await swarm.finished(bootstrap, *honest)
    (banned,) = swarm.records("banned")
    assert banned["peer"] == liar.peer_id
    assert "is not what two others found" in banned["why"]
    await liar.says("banned as others have found")
    assert not swarm.records("dispute")
    swarm.exact()


@pytest.mark.proof
async def test_who_gives_others_false_bundles_is_banned_and_nothing_that_came_of_them_counts(
    swarm: Swarm,
) -> None:
    swarm.run = resign(swarm.run, trust=ALWAYS, layouts=(((0, 3), (3, 6)),))
    bootstrap = await swarm.bootstrap(together=6, before="even_handed")
    honest = [swarm.volunteer(name) for name in "abcde"]
    liar = swarm.volunteer("f", before="sends_false_bundles")
    await swarm.finished(bootstrap, *honest, within_s=180.0)
    assert {record["peer"] for record in swarm.records("banned")} == {liar.peer_id}
    assert swarm.records("rollback")
    assert all(liar.peer_id in record["peers"] for record in swarm.records("dispute"))
    swarm.exact()


@pytest.mark.parametrize(("stages", "volunteers"), mostly_proof([(1, 3), (2, 4)], [(1, 3)]))
async def test_an_honest_volunteer_that_rounds_otherwise_is_never_accused(
    swarm: Swarm, stages: int, volunteers: int
) -> None:
    """The net fits its data: gradients are rounding noise, and two processors have no bit of it in common.

    Earlier versions banned one of three honest volunteers, or named two pairs in dispute in each step.
    """
    swarm.run = fitted_run(swarm.folder / "fitted", stages=stages)
    bootstrap = await swarm.bootstrap(together=volunteers, before="even_handed")
    others = [swarm.volunteer(f"v{number}") for number in range(1, volunteers)]
    await swarm.finished(bootstrap, *others, swarm.volunteer("other", before="rounds_otherwise"))
    for kind in ("banned", "dispute", "quarrel", "rollback"):
        assert not swarm.records(kind)
    assert swarm.judged().steps == STEPS
    replayed = replay(swarm.run.path)
    assert replayed.ok, replayed.problems
    assert replayed.near, "it computes otherwise"
