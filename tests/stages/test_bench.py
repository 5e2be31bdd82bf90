"""The worker's room, shared by steps that are under way side by side."""

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.execution.bench import DEPTH, Bench
from hetpeer.stages.execution.effects import ReportSealed, RunBackward, RunForward, SendActivation, TaskKey
from hetpeer.stages.execution.pipeline import Pipeline
from hetpeer.stages.execution.routes import Hop

ROSTER = {"a": (0, 1), "b": (1, 2)}
ALONE = (Hop("a", 0, 2),)
ON = (Hop("a", 0, 1), Hop("b", 1, 2))


def steps(bench, count, *, roster=ROSTER, capacity=8):
    return [Pipeline("a", roster, 8, capacity, bench) for _ in range(count)]


def keys(effects, kind):
    return [effect.key.id for effect in effects if isinstance(effect, kind)]


def test_the_older_step_comes_first_and_a_backward_before_any_forward():
    bench = Bench()
    older, newer = steps(bench, 2, roster={"a": (0, 2)})
    begun = [effect for n in range(DEPTH) for effect in newer.assign(n, ALONE, 0)]
    assert keys(begun, RunForward) == [0], "the last hop alternates"
    key = begun[0].key
    assert keys(older.assign(5, ALONE, 0), RunForward) == [], (
        "as many as may wait for their gradient are under way"
    )
    assert bench.turn() is None
    assert keys(newer.forward_done(key, None, 1.0), RunBackward) == [0], (
        "a backward goes before the older forward"
    )
    assert bench.turn() is None
    after = newer.backward_done(key, None)
    assert not keys(after, RunForward), "the newer step's own forward is not next"
    assert bench.turn() is older
    assert keys(older.resume(), RunForward) == [5]


def test_what_needs_the_newest_parameters_waits_for_them_and_holds_nobody_up():
    bench = Bench(lambda _: 8)
    older = Pipeline("a", ROSTER, 8, 8, bench)
    newer = Pipeline("a", ROSTER, 8, 8, bench, early=1)
    assert keys(newer.assign(2, ON, 0), RunForward) == []
    assert not newer.held_up, "no room would help it"
    begun = newer.assign(0, ON, 0)
    assert keys(begun, RunForward) == [0]
    assert keys(older.assign(5, ON, 0), RunForward) == [5]
    for one, number in ((newer, 0), (older, 5)):
        done = one.forward_done(TaskKey(number, 0), f"output {number}", None)
        assert keys(done, RunForward) == []
    assert keys(newer.catch_up(), RunForward) == [2]
    assert keys(newer.assign(3, ON, 0), RunForward) == [3]


def test_what_is_over_takes_no_room():
    bench = Bench()
    older, newer = steps(bench, 2)
    begun = [effect for n in range(4) for effect in older.assign(n, ON, 0)]
    assert len(keys(begun, RunForward)) == DEPTH
    assert not newer.assign(0, ON, 0)
    older.over()
    assert bench.turn() is newer
    assert keys(newer.resume(), RunForward) == [0]


def test_forwards_of_all_steps_together_wait_for_their_gradient():
    bench = Bench(lambda _: 3)
    older, newer = steps(bench, 2)
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
        while (turn := bench.turn()) is not None:
            pending += [(turn, effect.key) for effect in turn.resume() if isinstance(effect, RunForward)]
    assert sent == 3


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), unique=True, max_size=24), st.randoms())
def test_all_work_of_all_steps_is_done(tasks, random):
    """Whatever comes when, and in whatever order the worker's answers are heard."""
    bench = Bench()
    pipelines = steps(bench, 3, roster={"a": (0, 2)}, capacity=2)
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
        while (turn := bench.turn()) is not None:
            take(turn, turn.resume())
        assert len(at_work) <= DEPTH
    assert done == set(tasks)
