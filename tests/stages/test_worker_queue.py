"""The worker's room, shared by steps that are under way side by side."""

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.pipeline.delays import Delays
from hetpeer.stages.pipeline.effects import (
    ForgetGraph,
    ReportSealed,
    RunBackward,
    RunForward,
    SendActivation,
    TaskKey,
)
from hetpeer.stages.pipeline.pipeline import Pipeline
from hetpeer.stages.pipeline.routes import Hop
from hetpeer.stages.pipeline.schedule_1f1b import DEPTH, InFlightWindow, WorkerQueue

ROSTER = {"a": (0, 1), "b": (1, 2)}
ALONE = (Hop("a", 0, 2),)
ON = (Hop("a", 0, 1), Hop("b", 1, 2))


class Room(InFlightWindow):
    """Room for so many forwards that wait for their gradient, whatever was measured."""

    def __init__(self, depth, most=64):
        super().__init__(most)
        self._depth = depth

    def depth(self, hops_after):
        return self._depth


def sent(one, *numbers, attempt=0):
    """These are handed out, and their outputs leave."""
    for number in numbers:
        assert keys(one.assign(number, ON, attempt), RunForward) == [number]
        one.forward_done(TaskKey(number, 0), f"output {number}", None)


def steps(queue, count, *, roster=ROSTER, capacity=8):
    return [Pipeline("a", roster, 8, capacity, queue) for _ in range(count)]


def keys(effects, kind):
    return [effect.key.id for effect in effects if isinstance(effect, kind)]


def test_the_older_step_comes_first_and_a_backward_before_any_forward():
    queue = WorkerQueue()
    older, newer = steps(queue, 2, roster={"a": (0, 2)})
    begun = [effect for n in range(DEPTH) for effect in newer.assign(n, ALONE, 0)]
    assert keys(begun, RunForward) == [0], "the last hop alternates"
    key = begun[0].key
    assert keys(older.assign(5, ALONE, 0), RunForward) == [], (
        "as many as may wait for their gradient are under way"
    )
    assert queue.turn() is None
    assert keys(newer.forward_done(key, None, 1.0), RunBackward) == [0], (
        "a backward goes before the older forward"
    )
    assert queue.turn() is None
    after = newer.backward_done(key, None)
    assert not keys(after, RunForward), "the newer step's own forward is not next"
    assert queue.turn()[0] is older.schedule
    assert keys(older.dispatch(), RunForward) == [5]


def test_what_needs_the_newest_parameters_waits_for_them_and_holds_nobody_up():
    queue = WorkerQueue(Room(8))
    older = Pipeline("a", ROSTER, 8, 8, queue)
    newer = Pipeline("a", ROSTER, 8, 8, queue, 1, Delays(head_start=1))
    assert keys(newer.assign(2, ON, 0), RunForward) == []
    assert not newer.held_up, "no room would help it"
    begun = newer.assign(0, ON, 0)
    assert keys(begun, RunForward) == [0]
    assert keys(older.assign(5, ON, 0), RunForward) == [5]
    for one, number in ((newer, 0), (older, 5)):
        done = one.forward_done(TaskKey(number, 0), f"output {number}", None)
        assert keys(done, RunForward) == []
    assert keys(newer.advance(0), RunForward) == [2]
    assert keys(newer.assign(3, ON, 0), RunForward) == [3]


def test_forwards_that_wait_for_an_older_step_take_no_room_from_it():
    """Else what is handed out again of the older step would wait for them, and they for it."""
    queue = WorkerQueue(Room(2))
    older = Pipeline("a", ROSTER, 8, 8, queue)
    newer = Pipeline("a", ROSTER, 8, 8, queue, 1, Delays(stages=((0, 1), (1, 0))))
    sent(newer, 0, 1)
    assert keys(newer.assign(2, ON, 0), RunForward) == []
    sent(older, 5, 6)
    assert keys(older.assign(7, ON, 0), RunForward) == [], "its own do"


def test_what_is_over_takes_no_room():
    queue = WorkerQueue()
    older, newer = steps(queue, 2)
    begun = [effect for n in range(4) for effect in older.assign(n, ON, 0)]
    assert len(keys(begun, RunForward)) == DEPTH
    assert not newer.assign(0, ON, 0)
    older.schedule.leave()
    assert queue.turn()[0] is newer.schedule
    assert keys(newer.dispatch(), RunForward) == [0]


def test_each_further_device_has_one_more_piece_of_work():
    window = Room(8)
    window.devices = 3
    (only,) = steps(WorkerQueue(window), 1)
    begun = [effect for n in range(8) for effect in only.assign(n, ON, 0)]
    assert len(keys(begun, RunForward)) == DEPTH + 2


def test_forwards_of_all_steps_together_wait_for_their_gradient():
    queue = WorkerQueue(Room(3))
    older, newer = steps(queue, 2)
    sent = 0
    work = [effect for one in (older, newer) for n in range(3) for effect in one.assign(n, ON, 0)]
    owner = {id(effect): one for one in (older, newer) for effect in work}
    assert owner
    pending = [(older, effect.key) for effect in work if isinstance(effect, RunForward)]
    while pending:
        one, key = pending.pop(0)
        done = one.forward_done(key, f"output {key.id}", None)
        sent += sum(isinstance(effect, SendActivation) for effect in done)
        pending += [(one, effect.key) for effect in done if isinstance(effect, RunForward)]
        for turn in queue.turns():
            other = next(one for one in (older, newer) if one.schedule is turn)
            pending += [(other, effect.key) for effect in other.dispatch() if isinstance(effect, RunForward)]
    assert sent == 3


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), unique=True, max_size=24), st.randoms())
def test_all_work_of_all_steps_is_done(tasks, random):
    """Whatever comes when, and in whatever order the worker's answers are heard."""
    queue = WorkerQueue()
    pipelines = steps(queue, 3, roster={"a": (0, 2)}, capacity=2)
    at_work, done, waiting = [], set(), list(tasks)

    def take(one, effects):
        for effect in effects:
            if isinstance(effect, RunForward | RunBackward):
                at_work.append((one, effect))
            elif isinstance(effect, ReportSealed):
                waiting.append((one, effect.slot))

    while waiting or at_work:
        choice = random.randrange(len(waiting) + len(at_work))
        if choice < len(waiting):
            which, what = waiting.pop(choice)
            if isinstance(which, Pipeline):
                take(which, which.settled(what, ()))
            else:
                take(pipelines[which], pipelines[which].assign(what, ALONE, 0))
        else:
            one, work = at_work.pop(choice - len(waiting))
            if isinstance(work, RunForward):
                take(one, one.forward_done(work.key, None, 1.0))
            else:
                done.add((pipelines.index(one), work.key.id))
                take(one, one.backward_done(work.key, None))
        for turn in queue.turns():
            other = next(one for one in pipelines if one.schedule is turn)
            take(other, other.dispatch())
        assert len(at_work) <= DEPTH
    assert done == set(tasks)


def test_what_only_looked_stuck_is_set_aside_and_its_gradient_is_taken():
    """In a burst of failures elsewhere: what was sent a moment ago was dropped for what was handed out
    anew, and nobody did it again before the next time-out.
    """
    one = Pipeline("a", ROSTER, 8, 8, WorkerQueue(Room(2)))
    sent(one, 0, 1)
    assert keys(one.assign(2, ON, 0), RunForward) == [], "there is no room"
    begun = one.assign(3, ON, 1)
    assert keys(begun, RunForward) == [3]
    assert not keys(begun, ForgetGraph)
    assert (one.schedule.held, len(one.schedule.aside)) == (3, 1)
    assert keys(one.gradient(0, 1, "gradient 0"), RunBackward) == [0]
    one.backward_done(TaskKey(0, 0), None)
    assert (one.schedule.held, len(one.schedule.aside)) == (2, 0)


def test_what_waits_for_room_and_is_handed_out_again_gets_it():
    one = Pipeline("a", ROSTER, 8, 8, WorkerQueue(Room(1)))
    sent(one, 0)
    assert keys(one.assign(1, ON, 0), RunForward) == []
    assert keys(one.assign(1, ON, 1), RunForward) == [1]


def test_beyond_a_windows_worth_or_without_memory_the_oldest_attempt_is_given_up():
    for room in (Room(1), Room(3, most=2)):
        queue = WorkerQueue(room)
        one = Pipeline("a", ROSTER, 8, 8, queue)
        sent(one, 0)
        if room.most == 2:
            sent(one, 1)
            queue.may_begin = lambda _step, reach, one=one: one.schedule.in_flight(reach) < 1
        else:
            sent(one, 1, attempt=1)
        begun = one.assign(2, ON, 2)
        assert keys(begun, ForgetGraph) == [0]
        assert keys(begun, RunForward) == [2] or room.most == 2
        assert one.gradient(0, 1, "late"), "it is released"


def test_who_was_handed_out_again_is_not_the_one_that_is_given_up():
    one = Pipeline("a", ROSTER, 8, 8, WorkerQueue(Room(1)))
    sent(one, 0)
    sent(one, 1, attempt=1)
    one.assign(0, ON, 3)  # it goes another way, and its gradient comes
    assert keys(one.assign(2, ON, 2), ForgetGraph) == [1]
