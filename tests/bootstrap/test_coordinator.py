"""The coordinator's state machine, driven by hand."""

from dataclasses import replace

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.effects import CollectCheckpoint, CoordinatorState, Record, Send
from tests.bootstrap.court import COURTS, Court, halted_court, kinds, objection, reducing, training


@pytest.mark.parametrize("state", CoordinatorState, ids=lambda state: state.value)
def test_the_courts_are_in_the_state_they_claim(state):
    assert COURTS[state]().core.state is state


def test_the_term_is_durable_before_anything_is_said():
    court = Court([{"kind": "reign", "term": 4}])
    assert court.records[-1] == {"kind": "reign", "term": 5}
    assert court.line == m.TermView(term=5, view=0)


def test_a_run_that_is_over_needs_no_volunteer():
    commits = [{"kind": "commit", "step": step, "loss": 1.0} for step in range(4)]
    sealed = {"kind": "checkpoint", "version": 4, "blocks": ["x", "y"]}
    over = Court([*commits, sealed])
    assert over.core.state is CoordinatorState.FINISHED
    assert over.records == [*commits, sealed]
    assert Court(commits).core.state is CoordinatorState.WAITING
    assert Court([*commits, sealed], evaluation_microbatches=1).core.state is CoordinatorState.WAITING


@pytest.mark.parametrize(
    "state", [s for s in CoordinatorState if s is not CoordinatorState.FINISHED], ids=lambda s: s.value
)
def test_events_that_need_no_decision(state):
    court = COURTS[state]()
    court.hello("z")
    court.tell("z", m.Heartbeat())
    reached = court.core.state
    assert court.tell("z", m.Failed(line=court.line, step=0, id=0, why="x")) == []
    assert court.core.not_saved(99, court.now) == []
    assert court.core.resumed("z", court.now) == []
    assert court.core.resumed("nobody", court.now) == court.core.broken("nobody", court.now) == []
    assert kinds(court.tell("z", m.Farewell())) == []
    assert "z" not in court.core.members.volunteers
    assert court.core.state is reached


# ── losing volunteers ───────────────────────────────────────────────────────────────────────────────────────


def test_a_broken_stream_has_its_grace():
    court = training()
    court.do(court.core.broken("a", court.now))
    court.tick(1.8)
    court.do(court.core.resumed("a", court.now))
    court.tick(1.8)
    assert "a" in court.core.members.volunteers
    court.do(court.core.broken("a", court.now))
    effects = court.tick(2.4)
    assert [x.record["why"] for x in effects if isinstance(x, Record)] == ["stream broken"]


def test_a_lease_expires_but_not_while_we_sleep_ourselves():
    court = training()
    court.now += 60.0
    assert kinds(court.tick(8.0)) == []
    effects = court.tick(4.0)
    assert kinds(effects) == ["gone", "gone", "rollback"]


def test_nobody_is_to_blame_when_all_streams_break_at_once():
    """Our own line was cut: they have the time in which a coordinator that was away is found."""
    court = training()
    for peer in "ab":
        court.do(court.core.broken(peer, court.now))
    court.core.renewed(court.now)
    passed = 0.0
    while passed < court.core.leases._context.config.return_s - 1.0:
        assert kinds(court.tick(0.9)) == []
        passed += 0.9
    court.do(court.core.resumed("a", court.now))
    effects = court.tick(0.9) + court.tick(0.9)
    assert [x.record["peer"] for x in effects if isinstance(x, Record)] == ["b"]


def test_several_that_leave_at_once_make_one_new_plan():
    court = Court().begin("a", "b", "c")
    court.count("a")
    court.tick(6.0)
    court.tell("a", m.Heartbeat())
    effects = court.tick(5.0)
    assert kinds(effects) == ["gone", "gone"]
    assert court.told("a", effects) == ["gone", "plan"]
    assert court.sent["a", "plan"].covers[0].receivers == ("a",)


def test_a_step_goes_on_without_those_who_are_not_in_it():
    court = training()
    court.prepare("c")
    assert court.tell("c", m.Sealed(line=court.line, step=0, slot=0, contents=(), losses={})) == []
    effects = court.tell("c", m.Farewell())
    assert [x for x in effects if isinstance(x, Send)] == []
    assert court.core.state is CoordinatorState.TRAINING


def test_what_a_lost_holder_had_counted_is_done_again():
    court = reducing()
    court.tell("a", m.Farewell())
    assert court.core.state is CoordinatorState.TRAINING
    court.sealed("b", (0, 1))
    assert court.sent["b", "plan"].covers[0].slots == (("b", (0, 1)),)


def test_without_a_holder_the_run_goes_back_to_the_checkpoint():
    court = Court().begin("a", "b")
    for _ in range(2):
        court.commit("a", "b")
    court.save()
    court.commit("a", "b")
    court.tell("a", m.Farewell())
    effects = court.tell("b", m.Farewell())
    (record,) = [x.record for x in effects if isinstance(x, Record) and x.record["kind"] == "rollback"]
    assert (record["to_version"], record["view"]) == (2, 1)
    assert sorted(court.core.history.commits) == [0, 1]


# ── checkpoints and the end ─────────────────────────────────────────────────────────────────────────────────


def test_a_checkpoint_is_one_record_of_all_blocks():
    court = Court(checkpoint_every=1).begin("a", "b")
    effects = court.commit("a", "b")
    (collect,) = [x for x in effects if isinstance(x, CollectCheckpoint)]
    assert (collect.version, collect.savers) == (1, {0: "a", 1: "b"})
    older = replace(collect, version=0)
    elsewhere = replace(collect, line=court.line.model_copy(update={"cluster": 1}))
    for other in (older, elsewhere):
        court.do(court.core.saved(other, 0, "of another order", court.now))
    court.do(court.core.saved(collect, 0, "state 0", court.now))
    assert court.records[-1]["kind"] == "commit"
    for other in (older, elsewhere):
        court.do(court.core.saved(other, 1, "of another order", court.now))
    assert court.records[-1]["kind"] == "commit"
    court.do(court.core.saved(collect, 1, "state 1", court.now))
    assert court.records[-1] == {"kind": "checkpoint", "version": 1, "blocks": ["state 0", "state 1"]}


def test_a_checkpoint_that_fails_is_asked_of_others_at_the_next_border():
    court = Court(checkpoint_every=2).begin("a", "b")
    court.commit("a", "b")
    court.commit("a", "b")
    assert court.core.not_saved(court.order, court.now) == []
    effects = court.commit("a", "b")
    (collect,) = [x for x in effects if isinstance(x, CollectCheckpoint)]
    assert (collect.version, collect.savers) == (3, {0: "b", 1: "a"})


def test_a_checkpoint_that_takes_longer_than_until_the_next_is_completed_first():
    """Otherwise there might never be one, and all training could be lost."""
    court = Court(steps=9, checkpoint_every=1).begin("a", "b")
    court.commit("a", "b")
    first = court.order
    for _ in range(3):
        assert not any(isinstance(x, CollectCheckpoint) for x in court.commit("a", "b"))
    for block in range(2):
        court.do(court.core.saved(first, block, f"state {block}", court.now))
    assert court.records[-1] == {"kind": "checkpoint", "version": 1, "blocks": ["state 0", "state 1"]}
    (second,) = [x for x in court.commit("a", "b") if isinstance(x, CollectCheckpoint)]
    assert second.version == 5


def test_at_the_end_nobody_waits_for_an_older_checkpoint():
    court = Court(steps=2, checkpoint_every=1).begin("a", "b")
    court.commit("a", "b")
    court.commit("a", "b")
    assert court.order.version == 2
    court.save()
    assert court.core.state is CoordinatorState.FINISHED


def test_a_saver_that_loses_its_state_does_not_hold_up_the_end():
    court = Court(steps=1).begin("a", "b")
    court.commit("a", "b")
    effects = court.tell("a", m.Prepared())
    (collect,) = [x for x in effects if isinstance(x, CollectCheckpoint)]
    assert set(collect.savers.values()) == {"b"}


def test_the_run_is_finished_when_the_last_checkpoint_is_durable():
    court = Court(steps=1, evaluation_microbatches=1, checkpoint_every=5).begin("a")
    court.tell("a", m.Evaluated(line=court.line, step=0, losses={2: 3.0}))
    court.commit("a")
    assert (court.core.state, court.core.step) == (CoordinatorState.TRAINING, 1)
    assert court.tell("a", m.Evaluated(line=court.line, step=1, losses={2: 2.0}))
    court.save()
    assert court.core.state is CoordinatorState.FINISHED
    assert court.sent["a", "finished"].completed
    assert court.core.history.evaluations == {0: 3.0, 1: 2.0}


def test_a_held_out_loss_is_the_mean_of_the_samples():
    court = Court(steps=1, evaluation_microbatches=2, evaluation_weights=[3, 1]).begin("a")
    court.tell("a", m.Evaluated(line=court.line, step=0, losses={2: 3.0, 3: 7.0}))
    court.commit("a")
    assert court.core.history.evaluations == {0: 4.0}


def test_a_held_out_loss_counts_of_who_holds_the_last_block():
    court = Court(steps=1, evaluation_microbatches=1, layouts=(((0, 1), (1, 2)),)).begin("a", "b")
    places = {peer: volunteer.place for peer, volunteer in court.core.members.volunteers.items()}
    last, other = sorted(places, key=places.get, reverse=True)
    court.tell(other, m.Evaluated(line=court.line, step=0, losses={2: 9.0}))
    court.tell(last, m.Evaluated(line=court.line, step=0, losses={2: 3.0}))
    court.commit("a", "b")
    assert court.core.history.evaluations == {0: 3.0}


def test_after_the_end_nothing_is_decided():
    court = halted_court()
    before = len(court.records)
    court.tell("a", m.Farewell())
    court.tell("a", m.Prepared())
    court.tell("a", objection(court, "b"))
    court.tick(30.0)
    order = CollectCheckpoint(court.line, 0, {0: "a", 1: "a"})
    assert court.core.saved(order, 0, "x", court.now) == []
    assert court.core.not_saved(order, court.now) == []
    assert len(court.records) == before
    assert court.core.state is CoordinatorState.FINISHED
