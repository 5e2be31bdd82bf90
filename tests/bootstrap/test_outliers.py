"""Contributions that are much longer than others."""

import math

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.outliers import (
    ENOUGH,
    FACTOR,
    NORM_FACTOR,
    RECENT,
    SHARED,
    LengthOutliers,
    NormOutliers,
    SlotLength,
    lengths,
)
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.bootstrap.state.failed_microbatches import room_s
from hetpeer.bootstrap.state.volunteer_state import LifeCycle
from tests.bootstrap.court import kinds, sole_holder

HUGE = 1e290
LINE = m.TermView(term=1, view=0)


def seen(length, block=0, peer="a", ids=1, alone=False):
    return {(block, peer): SlotLength(length / ids, length / ids**0.5, alone)}


def usual(length=1.0, times=ENOUGH):
    guard = LengthOutliers()
    for _ in range(times):
        guard.committed(seen(length))
    return guard


def test_what_is_much_longer_than_the_middle_one_is_unusual():
    guard = usual()
    assert guard.unusual(seen(FACTOR)) == set()
    assert guard.unusual(seen(1.01 * FACTOR) | seen(1.0, peer="b")) == {"a"}
    assert guard.unusual(seen(100.0, block=1)) == set(), "of that block nothing is known"


def test_sums_of_many_ids_may_grow_by_their_number_or_by_its_root():
    guard = usual()
    assert guard.unusual(seen(400.0, ids=400)) == set(), "they point the same way"
    assert guard.unusual(seen(20.0 * FACTOR, ids=400)) == set()
    noise = LengthOutliers()
    for _ in range(ENOUGH):
        noise.committed(seen(20.0, ids=400))
    assert noise.unusual(seen(1.0)) == set(), "one id of the same noise is 20 times as long by its number"


def test_before_enough_are_known_or_where_all_was_nothing_nothing_is_unusual():
    assert usual(times=ENOUGH - 1).unusual(seen(1e9)) == set()
    assert usual(0.0).unusual(seen(1e9)) == set()


def test_what_was_long_ago_is_forgotten_and_what_is_unusual_does_not_become_usual():
    guard = usual()
    for _ in range(RECENT):
        guard.committed(seen(20.0))
    assert guard.unusual(seen(100.0)) == {"a"}
    for _ in range(RECENT):
        guard.committed(seen(9.0))
    assert guard.unusual(seen(80.0)) == set()


def vote(*known):
    said = tuple(m.Length(block=block, peer=peer, squared=squared) for block, peer, squared in known)
    return m.Vote(line=LINE, step=0, plan=1, blocks=(), lengths=said)


def test_each_reducer_knows_its_share_and_the_middle_one_counts():
    cover = m.Cover(
        block=0,
        slots=(("a", (1, 2)), ("b", (3,)), ("c", (4,))),
        reducers=(("a", 1), ("b", 2), ("c", 1)),
        receivers=("a", "b", "c", "d"),
    )
    votes = {
        "a": vote((0, "a", 16.0), (0, "b", 1.0)),
        "b": vote((0, "a", 32.0), (0, "b", 1e300)),
        "c": vote((0, "a", 1e300), (0, "b", 1.0), (1, "a", 5.0)),
        "d": vote((0, "c", 1e300)),
    }
    found = lengths(votes, [cover])
    assert found.keys() == {(0, "a"), (0, "b")}, "d has no share"
    assert found[0, "a"][:2] == pytest.approx((4.0, 8.0 / 2**0.5))
    assert found[0, "b"][:2] == pytest.approx((2.0, 2.0))


def test_the_length_of_the_only_part_of_a_block_is_that_of_the_sum():
    covers = [
        m.Cover(block=b, slots=(("a", (1, 2)),), reducers=(("a", 1),), receivers=("a",)) for b in (0, 1)
    ]
    blocks = (
        m.BlockVote(block=0, digest="d", squared_norm=16.0, finite=True),
        m.BlockVote(block=1, digest="d", squared_norm=math.inf, finite=False),
    )
    own = m.Vote(line=LINE, step=0, plan=1, blocks=blocks)
    assert lengths({"a": own}, covers) == {(0, "a"): SlotLength(2.0, 4.0 / 2**0.5, alone=True)}
    assert lengths({"b": own}, covers) == {}, "it has not voted"


def test_sums_with_statistics_are_not_compared_with_sums_without_them():
    guard = usual()
    assert guard.unusual(seen(1.01 * FACTOR, alone=True)) == set(), "of such nothing is known"
    for _ in range(ENOUGH):
        guard.committed(seen(100.0, alone=True))
    assert guard.unusual(seen(1.01 * FACTOR)) == {"a"}
    assert guard.unusual(seen(101.0 * FACTOR, alone=True)) == {"a"}


# ── norms of a block with a single holder ───────────────────────────────────────────────────────────────────


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
