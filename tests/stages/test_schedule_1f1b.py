"""1F1B order."""

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.pipeline.schedule_1f1b import LossDistance, Schedule, ScheduledWork, WorkerQueue


def hops(after):
    """So far from the loss, in hops of one block."""
    return LossDistance(after + 1, after)


def take(schedule):
    """The next piece of work, begun; nothing else runs at the worker."""
    work = schedule.next()
    assert schedule.next() == work, "looking changes nothing"
    schedule.running = 0
    assert schedule.begin() == work
    return work


def test_backward_goes_first_while_there_is_room_for_it():
    room = []
    schedule = Schedule(WorkerQueue(), may_fold=lambda: bool(room))
    schedule.ready_forward("a", hops(0), train=True)
    schedule.ready_backward("b")
    assert take(schedule) == ScheduledWork("a", backward=False)
    room.append("a new slot")
    assert take(schedule) == ScheduledWork("b", backward=True)
    assert take(schedule) is None


def test_the_last_hop_alternates_and_others_run_ahead():
    for hops_after, ahead in ((0, 1), (1, 3), (2, 5)):
        schedule = Schedule(WorkerQueue())
        for number in range(8):
            schedule.ready_forward(number, hops(hops_after), train=True)
        begun = [take(schedule) for _ in range(8)]
        assert [w.key for w in begun if w is not None] == list(range(ahead))
        schedule.finished(0)
        assert take(schedule).key == ahead
        assert schedule.waits(lambda key: key == 7)
        assert not schedule.waits(range(ahead + 1).__contains__), "all of these are begun"


def test_what_waits_further_on_never_blocks_the_way_to_the_loss():
    schedule = Schedule(WorkerQueue())
    for number in range(5):
        schedule.ready_forward(number, hops(2), train=True)
        take(schedule)
    schedule.ready_forward("far", hops(2), train=True)
    schedule.ready_forward("near", hops(0), train=True)
    assert take(schedule).key == "near"


def test_what_goes_a_longer_way_now_does_not_block_a_nearer_one():
    """As when the next hop is gone, and its blocks are split between us and another."""
    schedule = Schedule(WorkerQueue())
    for number in range(3):
        schedule.ready_forward(number, hops(1), train=True)
        take(schedule)
    schedule.ready_forward("near", hops(1), train=True)
    schedule.ready_forward("moved", hops(0), train=True)
    schedule.moved("moved", 3)
    for number in range(3):
        schedule.moved(number, 2)
    assert take(schedule).key == "near"
    assert take(schedule).key == "moved"


def test_what_comes_back_here_is_not_blocked_by_itself():
    """A holder of everything has them over its first blocks; the way on was changed since, and is as long
    again.
    """
    schedule = Schedule(WorkerQueue())
    for number in range(3):
        schedule.ready_forward(number, LossDistance(4, 1), train=True)
        take(schedule)
    schedule.ready_forward("next", LossDistance(4, 1), train=True)
    schedule.ready_forward("further on", LossDistance(2, 1), train=True)
    assert take(schedule).key == "further on"
    assert take(schedule) is None


def test_evaluation_leaves_nothing_behind():
    schedule = Schedule(WorkerQueue())
    for number in range(4):
        schedule.ready_forward(number, hops(0), train=False)
    assert [take(schedule).key for _ in range(4)] == [0, 1, 2, 3]


@given(
    st.lists(
        st.tuples(st.builds(LossDistance, st.integers(1, 6), st.integers(0, 3)), st.booleans()),
        min_size=1,
        max_size=20,
    ),
    st.randoms(),
)
def test_everything_is_done_once_and_the_bound_holds(tasks, random):
    """Any order in which gradients come back: no task is lost, doubled, or waits for ever."""
    schedule = Schedule(WorkerQueue())
    for key, (reach, train) in enumerate(tasks):
        schedule.ready_forward(key, reach, train=train)
    waiting, forwards, backwards = [], [], []
    while True:
        work = take(schedule)
        if work is None and not waiting:
            break
        if work is None:
            key = waiting.pop(random.randrange(len(waiting)))
            schedule.ready_backward(key)
        elif work.backward:
            backwards.append(work.key)
            schedule.finished(work.key)
        else:
            forwards.append(work.key)
            reach, train = tasks[work.key]
            if train:
                waiting.append(work.key)
                assert sum(tasks[key][0].within(reach) for key in waiting) <= 2 * reach.hops_after + 1
    assert sorted(forwards) == list(range(len(tasks)))
    assert sorted(backwards) == [key for key, (_, train) in enumerate(tasks) if train]
