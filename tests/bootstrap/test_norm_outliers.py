"""A sole holder's word on its norm, by which everybody is clipped: what is far from all that was usual is found by somebody else first."""

import math

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.outliers import ENOUGH, NORM_FACTOR, SHARED, NormOutliers
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.bootstrap.state.failed_microbatches import room_s
from hetpeer.bootstrap.state.membership import LifeCycle
from tests.bootstrap.court import kinds, sole_holder

HUGE = 1e290


def votes(*norms):
    return {
        block: m.BlockVote(block=block, digest="d", squared_norm=norm**2, finite=True)
        for block, norm in enumerate(norms)
    }


@pytest.fixture
def norms():
    known = NormOutliers()
    for batch in range(ENOUGH):
        known.committed(batch, 2.0, usual=True)
    return known


def test_it_is_measured_by_what_whole_updates_usually_are(norms):
    assert norms.outliers(votes(1.0, 2.1 * NORM_FACTOR), alone=[1]) == {1: pytest.approx(1.05 * NORM_FACTOR)}
    assert norms.outliers(votes(1.0, 1.9 * NORM_FACTOR), alone=[1]) == {}
    assert norms.outliers(votes(1.0, math.sqrt(HUGE)), alone=[]) == {}, "others have found the same"
    assert NormOutliers().outliers(votes(1.0, math.sqrt(HUGE)), alone=[1]) == {}, "nobody knows what is usual"


def test_where_blocks_of_several_holders_are_as_long_it_is_the_models_doing(norms):
    assert norms.outliers(votes(2.1 * SHARED, 1e9), alone=[1]) == {}
    assert norms.outliers(votes(1.9 * SHARED, 1e9), alone=[1]) != {}


def test_it_is_refused_once_for_each_batch_and_does_not_become_usual(norms):
    assert [norms.refuses(40, 1), norms.refuses(40, 1), norms.refuses(41, 1)] == [True, False, True]
    for batch in range(ENOUGH, 40):
        norms.committed(batch, 1e9, usual=False)
    assert norms.outliers(votes(1.0, 1e9), alone=[1]) != {}
    norms.committed(41, 2.0, usual=True)
    assert norms.refuses(41, 1), "after it was committed it may be trained again, on another line"


def stages(*others, **changes):
    """`b` alone holds the second block, and so many steps are committed that it is known what is usual."""
    court = sole_holder(*others, steps=1000, checkpoint_every=1000, **changes)
    for _ in range(ENOUGH):
        step(court, "a", "b", *others)
    return court


def step(court, *peers, norms=None):
    """One more: counted, voted on, and applied if it is committed. What the votes have led to."""
    court.count(*peers)
    effects = [effect for peer in peers for effect in court.vote(peer, norm=(norms or {}).get(peer, 1.0))]
    for peer in peers if "commit" in kinds(effects) else ():
        begin, end = court.core.members.volunteers[peer].place
        version = court.core.history.version
        held = tuple(m.Held(block=b, version=version, digest="next") for b in range(begin, end))
        court.tell(peer, m.Applied(line=court.line, step=version - 1, held=held))
    return effects


def test_a_sole_holder_cannot_make_nothing_of_everybodys_update():
    court = stages("c")
    effects = step(court, "a", "b", "c", norms={"b": HUGE})
    assert "commit" not in kinds(effects)
    assert "fenced" in court.told("b", effects)
    (gone,) = [record for record in court.records if record["kind"] == "gone"]
    assert "the norm of block 1 in step 20 is" in gone["why"]
    assert "b" in court.core._context.failures.resting, "others are moved there meanwhile"


def test_a_model_that_has_such_a_step_goes_on_all_the_same():
    """Nobody else comes, or whoever does finds the same: it is the model's doing, and the log names it."""
    court = stages()
    step(court, "a", "b", norms={"b": HUGE})
    court.hello("b", incarnation=2, place=(1, 2))
    until = court.now + room_s(court.core._context.config) + 10.0
    while court.core.state is not CoordinatorState.TRAINING and court.now < until:
        for peer in "ab":
            court.tell(peer, m.Heartbeat())
            if court.core.members.volunteers[peer].life_cycle is LifeCycle.JOINING:
                court.tell(peer, m.Prepared())
            court.ready(peer)
        court.tick(1.0)
    while court.core.history.version < ENOUGH:
        step(court, "a", "b")
    effects = step(court, "a", "b", norms={"b": HUGE})
    assert "commit" in kinds(effects)
    commit = court.core.history.commits[ENOUGH]
    assert commit["outliers"] == {1: ("b", pytest.approx(math.sqrt(HUGE) / math.sqrt(2.0)))}
    assert commit["norm"] == pytest.approx(math.sqrt(HUGE))


def test_without_clipping_a_norm_is_a_figure():
    court = stages(clip_norm=None)
    assert "commit" in kinds(step(court, "a", "b", norms={"b": HUGE}))
    assert "outliers" not in court.core.history.commits[ENOUGH]
