"""The group scheduler by hand: graph, window, line, and the three sets of rules.

Random schedules: tests/simulation.
"""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging.groups.group_scheduler import Group, GroupPipelines, SyncGraph, WaitQueue
from hetpeer.averaging.groups.wait_window import Adaptive, WaitWindow
from tests.simulation.sdpipe import Artifact, Bounded, Paper

ALWAYS, NEVER = WaitWindow(math.inf), WaitWindow(0.0)


# ── the sync graph ──────────────────────────────────────────────────────────────────────────────────────────


def parts_by_flooding(members, groups):
    """The parts into which `groups` leave `members`."""
    parts = [{member} for member in members]
    for group in groups:
        touched = [part for part in parts if part & group]
        parts = [part for part in parts if not part & group]
        parts += [set().union(*touched)] if touched else []
    return {frozenset(part) for part in parts}


moves = st.one_of(
    st.tuples(st.just("add"), st.sets(st.integers(0, 7), min_size=1)),
    st.tuples(st.just("join"), st.tuples(st.integers(8, 11), st.integers(0, 11))),
    st.tuples(st.just("leave"), st.integers(0, 11)),
)


@given(st.integers(1, 6), st.lists(moves, max_size=40))
def test_the_forest_of_newest_edges_tells_the_parts_of_the_whole_span(span, history):
    members = {str(n) for n in range(8)}
    graph = SyncGraph(span, members)
    shared, first = [[]], -math.inf
    for kind, what in history:
        if kind == "add":
            group = {str(n) for n in what} & members
            if not group:
                continue
            graph.add(sorted(group))
            shared.append([group])
        elif kind == "join":
            name, like = map(str, what)
            if name in members or like not in members or name == like:
                continue
            members.add(name)
            graph.join(name, like)
            shared[-1].append({name, like})
        elif str(what) in members and len(members) > 1:
            members.discard(str(what))
            graph.leave(str(what))
        formed = len(shared) - 1
        first = max(first, formed - span * len(members) + 2)  # what is too old stays so
        counting = [g & members for n, several in enumerate(shared) if n >= max(first, 0) for g in several]
        expected = parts_by_flooding(members, counting)
        assert graph.parts == len(expected)
        assert all(len({graph.part(member) for member in part}) == 1 for part in expected)
        assert graph.binding == (formed >= span * len(members) - 1)


def test_a_graph_without_a_span_asks_for_nothing():
    graph = SyncGraph(None, "abc")
    for _ in range(100):
        graph.add("a")
    assert not graph.binding
    with pytest.raises(ValueError, match="a span of 0 groups"):
        SyncGraph(0, "abc")


# ── the window ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_window_grows_after_groups_of_one_and_shrinks_after_others():
    window = Bounded(start=1.0, least=0.5, most=3.0)
    seconds = [window.seconds("a", 4)]
    for group in ("a", "a", "ab", "ab") + ("abc",) * 20:
        window.formed(group, 4, 0.0)
        seconds.append(window.seconds("a", 4))
    assert seconds[:5] == pytest.approx([1.0, 2.0, 3.0, 2.7, 2.43])
    assert seconds[-1] == 0.5
    assert window.seconds("a", 1) == 0.0


def test_the_adaptive_window_begins_with_the_papers_nth_of_an_iteration():
    window = Adaptive(40, most=1.0)
    assert window.seconds("a", 4) == 0.0
    window.formed("ab", 4, now=10.0)
    window.arrived("a", 12.0)
    assert window.seconds("a", 4) == pytest.approx(2.0 * 0.9 / 4)
    for _ in range(10):
        window.formed("a", 4, now=20.0)
    assert window.seconds("a", 4) == pytest.approx(2.0)
    window.left("b")
    window.arrived("b", 1000.0)
    assert window.seconds("a", 4) == pytest.approx(2.0)


def iterations(window, workers, seconds, now=0.0):
    """They average, and are ready again after `seconds`."""
    window.formed(workers, len(workers), now)
    for worker in workers:
        window.arrived(worker, now + seconds)


def test_nobody_waits_for_more_than_a_twentieth_of_an_iteration():
    window = Adaptive(40)
    iterations(window, "abcd", 2.0)
    for _ in range(10):
        window.formed("a", 4, now=20.0)
    assert window.seconds("a", 4) == pytest.approx(0.1)


def test_who_has_averaged_lately_goes_on_alone_as_long_as_averaging_is_dear():
    window = Adaptive(40)
    for _ in range(10):
        iterations(window, "ab", 2.0)
    before = window.seconds("b", 2)
    assert 0 < before < 0.05
    assert window.interval == 1
    window.averaged(0.35)
    assert window.interval == 4  # 0.35 of 8 seconds
    for _ in range(3):
        assert window.seconds("b", 2) == 0.0
        window.formed("b", 2, 10.0)
        window.arrived("b", 12.0)
    assert window.seconds("b", 2) == pytest.approx(before)  # who was spared has waited for nobody in vain
    window.averaged(1e9)
    assert window.interval == 16
    window.left("b")
    window.arrived("b", 50.0)
    assert window.seconds("b", 2) == 0.0


@pytest.mark.parametrize(
    ("takes_s", "rests", "trains_on"), [(0.02, 1, 1), (0.6, 12, 2), (1.0, 16, 2), (1.2, 16, 4), (3.0, 16, 16)]
)
def test_who_trains_on_meanwhile_averages_more_often_if_it_need_not_wait_for_the_mean(
    takes_s, rests, trains_on
):
    """It trains for an iteration, here of a second, and stands still for the rest of an averaging."""
    for busy, interval in ((False, rests), (True, trains_on)):
        window = Adaptive(40, busy=busy)
        for _ in range(10):
            iterations(window, "ab", 1.0)
        window.averaged(takes_s)
        assert window.interval == interval


# ── a line ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_is_due_when_the_window_of_the_first_is_over_or_everybody_is_here():
    line = WaitQueue(SyncGraph(None, "abc"), WaitWindow(5.0))
    assert not line.is_due(100.0)
    line.arrive("a", 100.0)
    line.arrive("b", 104.0)
    line.arrive("stranger", 104.0)
    assert line.due_at == 105.0
    assert not line.is_due(104.9)
    assert line.is_due(105.0)
    line.arrive("c", 104.9)
    assert line.is_due(104.9)
    assert line.form(104.9) == ("a", "b", "c")
    assert line.is_empty
    assert line.due_at == math.inf


def test_who_waits_may_go_when_the_span_would_connect_everybody():
    line = WaitQueue(SyncGraph(1, "abcd"), NEVER)
    for group in ("c", "d", "ab"):
        assert not line.graph.binding
        line.graph.add(group)
    for worker, connects in (("a", False), ("c", False), ("d", True)):
        line.arrive(worker, 0.0)
        assert line.valid is connects
    line.leave("d")
    assert line.valid
    line.join("e", like="b")
    assert line.valid
    line.join("f", like=None)
    assert not line.connects
    assert line.valid, "five groups are a span of five workers"


# ── the rules ───────────────────────────────────────────────────────────────────────────────────────────────


def feed(scheduler, *arrivals, now=0.0):
    return [g for stage, worker in arrivals for g in scheduler.ready(stage, worker, now)]


def test_pipelines_wait_as_a_whole_and_all_their_stages_average_with_the_same():
    scheduler = GroupPipelines(2, "abc", None, WaitWindow(1.0))
    assert feed(scheduler, (1, "a"), (1, "b"), (0, "a"), (0, "a")) == []
    assert scheduler.due_at == 1.0
    assert scheduler.tick(0.9) == []
    assert feed(scheduler, (0, "b"), now=0.95) == []
    assert scheduler.tick(1.0) == [Group(0, 1, ("a", "b")), Group(1, 1, ("a", "b"))]
    assert scheduler.tick(5.0) == []
    assert feed(scheduler, (0, "a"), now=6.0) == []  # both stages are new again


def test_without_end_is_all_reduce_and_without_window_local_until_the_span_asks_for_all():
    everybody = GroupPipelines(1, "abc", 10, ALWAYS)
    assert feed(everybody, (0, "a"), (0, "b")) == []
    assert feed(everybody, (0, "c")) == [Group(0, 1, ("a", "b", "c"))]
    local = GroupPipelines(1, "ab", 3, NEVER)
    assert [g.members for g in feed(local, *5 * [(0, "a")])] == 5 * [("a",)]
    assert feed(local, (0, "a")) == []
    assert [g.members for g in feed(local, (0, "b"))] == [("a", "b")]


def test_one_slow_of_many_holds_nobody_up():
    """Nineteen that need about a second, and one that needs nine: a span is ten iterations of each,
    however many they are.
    """
    workers = [str(n) for n in range(20)]
    scheduler, draw = GroupPipelines(1, workers, 10, Adaptive(10)), random.Random(0)
    ready = {worker: draw.random() for worker in workers}
    iterations, now = Counter(), 0.0
    while now < 100.0:
        worker = min(ready, key=ready.get)
        if now < scheduler.due_at < ready[worker]:
            now = scheduler.due_at
            groups = scheduler.tick(now)
        else:
            now = ready.pop(worker)
            groups = scheduler.ready(0, worker, now)
        for group in groups:
            iterations.update(group.members)
            for one in group.members:
                ready[one] = now + (9.0 if one == "0" else 1.0) * draw.uniform(0.9, 1.1)
    assert min(iterations[str(n)] for n in range(1, 20)) >= 85
    assert iterations["0"] >= 10


def test_who_leaves_is_not_waited_for_and_who_comes_is():
    scheduler = GroupPipelines(1, "abc", 1, ALWAYS)
    assert feed(scheduler, (0, "a"), (0, "b")) == []
    assert scheduler.joined("d", "a", 0.0) == []
    assert scheduler.left("c", 0.0) == []
    assert [g.members for g in feed(scheduler, (0, "d"))] == [("a", "b", "d")]
    assert scheduler.left("a", 0.0) == scheduler.left("b", 0.0) == []
    assert [g.members for g in feed(scheduler, (0, "d"))] == [("d",)]


def test_the_paper_lets_one_stage_gather_everybody_and_does_not_check_the_others_meanwhile():
    scheduler = Paper(2, "ab", 1, lambda: NEVER)
    assert feed(scheduler, (1, "b"), (0, "b")) == [Group(1, 1, ("b",)), Group(0, 1, ("b",))]
    assert feed(scheduler, (1, "a")) == []  # stage 1 gathers
    assert feed(scheduler, (0, "b")) == [Group(0, 2, ("b",))]  # which connects nobody
    assert feed(scheduler, (1, "b")) == [Group(1, 2, ("a", "b"))]
    assert feed(scheduler, (0, "a")) == []  # now it is stage 0's turn
    assert scheduler.due_at <= 0.0
    assert scheduler.left("b", 0.0) == [Group(0, 3, ("a",))]


def test_the_artifact_checks_every_tenth_round_of_updates():
    scheduler = Artifact(1, "ab")
    for _ in range(20):
        (group,) = feed(scheduler, (0, "a")) or scheduler.tick(1e9)
        assert group.members == ("a",)
    assert feed(scheduler, (0, "a")) == scheduler.tick(1e9) == []
    assert [g.members for g in feed(scheduler, (0, "b"))] == [("a", "b")]
    assert feed(scheduler, (0, "a")) == []
    assert [g.members for g in scheduler.tick(1e9)] == [("a",)]


def test_the_artifact_cuts_groups_of_more_than_eight_workers_into_pairs():
    workers = [f"w{n}" for n in range(9)]
    groups = feed(Artifact(1, workers), *((0, worker) for worker in workers))
    assert [(g.number, len(g.members)) for g in groups] == [(1, 2), (2, 2), (3, 2), (4, 2), (5, 1)]
    assert sorted(member for g in groups for member in g.members) == workers
