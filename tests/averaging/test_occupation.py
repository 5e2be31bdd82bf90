"""What a worker does, and for what it waits."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.member import Phase
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.utilization import RECENT_S, Occupation, OccupationShares
from tests.averaging.rig import LINE, STEP, begin, commit, member_in, reduced


def test_shares_are_of_the_time_between_words():
    shares = OccupationShares()
    assert sum(shares.lately(5.0).values()) == 0.0
    assert shares.note(Occupation.COMPUTES, 10.0) is None
    assert shares.note(Occupation.COMPUTES, 11.0) is None
    assert shares.note(Occupation.DATA, 13.0) == (Occupation.COMPUTES, 10.0)
    assert shares.note(Occupation.ROOM, 14.0) == (Occupation.DATA, 13.0)
    found = shares.lately(14.0)
    assert sum(found.values()) == pytest.approx(1.0)
    assert found[Occupation.COMPUTES] == pytest.approx(0.75, abs=0.02)
    assert shares.seconds[Occupation.COMPUTES] == 3.0
    assert shares.seconds[Occupation.DATA] == 1.0


def test_what_was_long_ago_is_forgotten_though_nothing_is_said():
    shares = OccupationShares()
    shares.note(Occupation.COMPUTES, 0.0)
    shares.note(Occupation.STEP, 100.0)
    assert shares.lately(100.0)[Occupation.COMPUTES] == 1.0
    assert shares.lately(100.0 + 3 * RECENT_S)[Occupation.COMPUTES] < 0.07
    assert shares.seconds[Occupation.COMPUTES] == 100.0


@pytest.mark.parametrize(
    ("phase", "does"),
    [
        (Phase.READY, Occupation.STEP),
        (Phase.TRAINING, Occupation.COMPUTES),
        (Phase.REDUCING, Occupation.STEP),
        (Phase.APPLYING, Occupation.STEP),
    ],
    ids=lambda value: value.value,
)
def test_a_member_knows_what_its_worker_does(phase, does):
    assert member_in(phase).work.occupation is does


def test_it_waits_for_data_for_room_and_for_a_step():
    member = member_in(Phase.TRAINING)
    key = p.TaskKey(0, 0)
    member.work.forward_done(STEP, key, None, 0.5)
    member.work.backward_done(STEP, key, None)
    assert member.work.occupation is Occupation.DATA, "others may still need us"
    member.receive(m.Settled(line=LINE, step=STEP.number, slot=0))
    reduced(member)
    assert member.work.occupation is Occupation.STEP
    member.receive(begin(STEP.number + 1).model_copy(update={"behind": 1}))
    assert member.work.occupation is Occupation.COMPUTES
    member.receive(commit())
    assert member.work.occupation is Occupation.COMPUTES, "of the next step"
