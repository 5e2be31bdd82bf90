"""Steps that overlap, at a coordinator driven by hand (docs/asynchronous.md)."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.state.effects import CoordinatorState, Record, Send
from tests.bootstrap.court import BLOCKS, Court


def court(staleness=1, **changes):
    return Court(**({"staleness": staleness, "steps": 8, "checkpoint_every": 100} | changes))


def begun(effects, peer="a"):
    """(step, behind) of the steps that begin."""
    return [
        (x.message.step, x.message.behind)
        for x in effects
        if isinstance(x, Send) and x.to == peer and isinstance(x.message, m.Begin)
    ]


def behind(one):
    return [record.get("behind", 0) for record in one.records if record["kind"] == "commit"]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_so_many_begin_before_the_one_that_they_follow_is_committed(staleness):
    one = court(staleness)
    one.prepare("a")
    effects = one.ready("a")
    assert begun(effects) == [(step, step) for step in range(staleness + 1)]
    for step in range(8):
        assert one.core.step == step
        effects = one.commit("a")
        following = step + 1 + staleness
        assert begun(effects) == ([(following, staleness)] if following < 8 else [])
        one.tick(3.0)
        if step < 7:
            one.tell("a", m.Heartbeat())
    assert behind(one) == [min(step, staleness) for step in range(8)]
    took = [record["seconds"] for record in one.records if record["kind"] == "commit"]
    assert took[1:] == pytest.approx([3.0] * 7), "a step's seconds are those for which it was waited for"
    assert one.core.history.version == 8


def test_the_first_steps_do_not_overlap_if_they_are_to_be_fresh():
    one = court(2, fresh_steps=3)
    one.prepare("a")
    assert begun(one.ready("a")) == [(0, 0)]
    assert begun(one.commit("a")) == [(1, 0)]
    assert begun(one.commit("a")) == [(2, 0), (3, 1), (4, 2)]
    while one.core.history.version < 8:
        one.commit("a")
    assert behind(one) == [0, 0, 0, 1, 2, 2, 2, 2]


def test_a_younger_step_is_counted_and_reduced_when_it_is_its_turn():
    one = court().begin("a", "b")
    effects = one.count("a", step=1)
    assert one.told("a", effects) == ["settled"]
    assert one.core.state is CoordinatorState.TRAINING
    effects = one.count("a", step=0)
    assert one.told("a", effects) == ["settled", "plan"]
    assert one.sent["a", "plan"].step == 0
    one.vote("a")
    effects = one.vote("b")
    assert one.told("b", effects) == ["commit", "begin", "plan"]
    assert (one.sent["b", "plan"].step, one.core.state) == (1, CoordinatorState.REDUCING)


def test_nobody_waits_for_a_younger_step():
    """Its undone ids are not handed out again: their work comes after that of the older step."""
    one = court(stall_s=5.0).begin("a", "b")
    one.count("a", step=0)
    for _ in range(200):
        one.tick(0.2)
        one.tell("a", m.Reducing(line=one.line, step=0, plan=1))
        one.tell("b", m.Heartbeat())
    told = [message for (_, kind), message in one.sent.items() if kind == "reroute"]
    assert told == []


def test_what_stands_still_a_second_time_may_wait_for_a_younger_step():
    one = court(stall_s=5.0).begin("a", "b")

    def handed_out():
        """Steps whose ids were handed out, until something was."""
        steps: list[int] = []
        while not steps:
            effects = one.tick(1.0)
            steps = [
                s.message.step
                for s in effects
                if isinstance(s, Send) and s.message.kind == "reroute" and s.message.tasks
            ]
            for name in ("a", "b"):
                one.tell(name, m.Heartbeat())
        return set(steps)

    assert handed_out() == {0}
    assert handed_out() == {0, 1}
    one.sealed("a", (0,))
    assert handed_out() == {0}, "something was counted"


@pytest.mark.parametrize("evaluated", [0, 1])
def test_what_is_evaluated_is_the_newest(evaluated):
    one = court(2, evaluation_microbatches=evaluated, evaluate_every=3)
    one.prepare("a")
    effects = one.ready("a")
    assert begun(effects) == ([(0, 0), (1, 1), (2, 2)])
    for ids in ((0, 1), (0, 1)):
        if evaluated and one.core.step == 0:
            one.tell("a", m.Evaluated(line=one.line, step=0, losses={2: 1.0}))
        one.sealed("a", ids)
        effects = one.vote("a")
        assert begun(effects) == ([] if evaluated else [(one.core.step + 2, 2)])
    effects = one.commit("a")
    assert begun(effects) == ([(3, 0), (4, 1), (5, 2)] if evaluated else [(5, 2)])


def test_a_newcomer_is_let_in_between_steps_that_do_not_overlap():
    one = court().begin("a")
    assert one.core.step == 0
    one.prepare("b")
    assert ("b", "fetch") not in one.sent, "the next one began with a version that is past by then"
    assert begun(one.commit("a")) == [], "it is expected"
    effects = one.commit("a")
    assert begun(effects) == [(2, 0)]
    assert one.sent["b", "fetch"].version == 2
    effects = one.ready("b")
    assert begun(effects, "b") == [(2, 0), (3, 1)], (
        "it comes into the step that runs, and from then on they overlap"
    )
    assert begun(effects) == [(3, 1)]
    assert one.sent["a", "begin"].roster.keys() == {"a", "b"}


def test_who_never_gets_ready_does_not_keep_them_apart_for_ever():
    one = court(steps=1000, sync_s=1.0).begin("a")
    one.prepare("b")
    for _ in range(200):
        one.commit("a")
        one.tick(0.2)
        one.tell("b", m.Heartbeat())
        while one.core.state not in (CoordinatorState.TRAINING, CoordinatorState.REDUCING):
            one.tick(0.2)
            one.tell("b", m.Heartbeat())
            one.tell("a", m.Heartbeat())
    assert behind(one)[-1] == 1


def test_the_run_stands_still_for_an_arrangement():
    one = court(layouts=(((0, 1), (1, BLOCKS)),))
    one.begin("a", "b")
    seats = {"a": (0, (1, 2)), "b": (0, (0, 1))}
    assert one.core.arrange(Arrangement((((0, 1), (1, 2)),), seats), one.now) == []
    for _ in range(2):
        begins = []
        step = one.core.step
        one.sealed("a", (0, 1), blocks=(0, 1))
        one.sealed("b", (0, 1), blocks=(1, 2))
        for peer in ("a", "b"):
            begins += begun(one.vote(peer))
        assert begins == [], step
    assert one.core.state is CoordinatorState.WAITING
    assert one.sent["a", "save"].version == 2
    one.save()
    assert (one.sent["a", "granted"].begin, one.sent["a", "granted"].end) == (1, 2)


def test_a_leaver_is_struck_off_all_of_them():
    one = court(2).begin("a", "b")
    for step in (0, 1):
        one.sealed("b", (1,), step=step)
    effects = one.tell("b", m.Farewell())
    assert one.told("a", effects).count("gone") == 1
    rerouted = [x.message for x in effects if isinstance(x, Send) and x.message.kind == "reroute"]
    assert {message.step for message in rerouted} <= {0, 1, 2}
    for step in (0, 1, 2):
        one.sealed("a", (0, 1), slot=step, step=step)
        effects = one.vote("a")
        assert [x.record["step"] for x in effects if isinstance(x, Record)] == [step]
    assert "b" not in one.sent["a", "begin"].roster


@pytest.mark.parametrize("stored", [True, False])
def test_without_the_holders_of_older_versions_the_run_goes_back(stored):
    """A fresh step alone would wait for a volunteer that fetches its version; here nobody else has that
    state.
    """
    one = court(layouts=(((0, 1), (1, BLOCKS)),), checkpoint_every=1)
    one.begin("a", "b")
    one.sealed("a", (0, 1), blocks=(0, 1))
    one.sealed("b", (0, 1), blocks=(1, 2))
    one.vote("a")
    one.vote("b")
    if stored:
        one.save()
    assert [s.behind for s in map(one.core.machine.steps.numbered, (1, 2)) if s] == [1, 1]
    effects = one.tell("b", m.Farewell())
    (record,) = [x.record for x in effects if isinstance(x, Record) and x.record["kind"] == "rollback"]
    assert record["to_version"] == (1 if stored else 0)
    assert one.core.step is None
    assert begun(one.prepare_again("a", "b")) == [(record["to_version"], 0), (record["to_version"] + 1, 1)]


def test_a_new_reign_begins_with_what_is_committed():
    one = court(2).begin("a")
    one.commit("a")
    one.commit("a")
    after = court_of(one)
    after.hello("a", place=(0, BLOCKS), held=held(2))
    effects = after.ready("a")
    assert begun(effects) == [(2, 0), (3, 1), (4, 2)]


def held(version):
    return tuple(m.Held(block=b, version=version, digest=f"state {b}") for b in range(BLOCKS))


def court_of(one):
    return Court(one.records, staleness=2, steps=8, checkpoint_every=100)
