"""What a worker does, and for what it waits."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.work_in_progress import WorkerOccupation
from hetpeer.peer.training.volunteer_figures import RECENT_S, OccupationShares
from hetpeer.stages.pipeline import effects as p
from tests.averaging.rig import LINE, STEP, begin, commit, member_in, reduced


def test_shares_are_of_the_time_between_words():
    shares = OccupationShares()
    assert sum(shares.lately(5.0).values()) == 0.0
    assert shares.note(WorkerOccupation.COMPUTES, 10.0) is None
    assert shares.note(WorkerOccupation.COMPUTES, 11.0) is None
    assert shares.note(WorkerOccupation.DATA, 13.0) == (WorkerOccupation.COMPUTES, 10.0)
    assert shares.note(WorkerOccupation.ROOM, 14.0) == (WorkerOccupation.DATA, 13.0)
    found = shares.lately(14.0)
    assert sum(found.values()) == pytest.approx(1.0)
    assert found[WorkerOccupation.COMPUTES] == pytest.approx(0.75, abs=0.02)
    assert shares.seconds[WorkerOccupation.COMPUTES] == 3.0
    assert shares.seconds[WorkerOccupation.DATA] == 1.0


def test_what_was_long_ago_is_forgotten_though_nothing_is_said():
    shares = OccupationShares()
    shares.note(WorkerOccupation.COMPUTES, 0.0)
    shares.note(WorkerOccupation.STEP, 100.0)
    assert shares.lately(100.0)[WorkerOccupation.COMPUTES] == 1.0
    assert shares.lately(100.0 + 3 * RECENT_S)[WorkerOccupation.COMPUTES] < 0.07
    assert shares.seconds[WorkerOccupation.COMPUTES] == 100.0


@pytest.mark.parametrize(
    ("phase", "does"),
    [
        (Phase.READY, WorkerOccupation.STEP),
        (Phase.TRAINING, WorkerOccupation.COMPUTES),
        (Phase.REDUCING, WorkerOccupation.STEP),
        (Phase.APPLYING, WorkerOccupation.STEP),
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
    assert member.work.occupation is WorkerOccupation.DATA, "others may still need us"
    member.receive(m.Settled(line=LINE, step=STEP.number, slot=0))
    reduced(member)
    assert member.work.occupation is WorkerOccupation.STEP
    member.receive(begin(STEP.number + 1).model_copy(update={"behind": 1}))
    assert member.work.occupation is WorkerOccupation.COMPUTES
    member.receive(commit())
    assert member.work.occupation is WorkerOccupation.COMPUTES, "of the next step"
