"""The handshake: which volunteers come in, and which states they are believed to hold."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.effects import CoordinatorState, Disconnect
from hetpeer.bootstrap.state.volunteer_state import LifeCycle
from tests.bootstrap.court import COURTS, Court, finished, halted_court, kinds, training


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (m.Hello(run="run", incarnation=1, wire_version=99), "version"),
        (m.Hello(run="other", incarnation=1), "run"),
    ],
)
def test_who_cannot_take_part_is_told_why(hello, reason):
    court = Court()
    told, closed = court.tell("a", hello)
    assert (told.message.kind, told.message.reason, closed) == ("rejected", reason, Disconnect("a"))
    assert "a" not in court.core.members.volunteers


def test_strangers_are_not_heard_until_they_introduce_themselves():
    assert Court().tell("a", m.Heartbeat()) == [Disconnect("a")]


def test_claims_race_and_the_second_is_offered_what_is_left():
    court = Court()
    court.hello("a")
    court.hello("b")
    claim = m.Claim(cluster=0, begin=0, end=2)
    assert court.told("a", court.tell("a", claim)) == ["granted"]
    (refused,) = court.tell("b", claim)
    assert [p.cluster for p in refused.message.places if p.open] == [1]
    assert court.tell("a", m.Claim(cluster=1, begin=0, end=2)) == []


def test_an_older_incarnation_is_fenced_and_a_newer_one_displaces():
    court = training()
    told, _ = court.hello("a", incarnation=0)
    assert told.message.kind == "fenced"
    effects = court.hello("a", incarnation=2)
    assert kinds(effects) == ["gone"]
    assert "gone" in court.told("b", effects)
    assert court.told("a", effects) == ["welcome"]


@pytest.mark.parametrize(
    "state", [s for s in CoordinatorState if s is not CoordinatorState.FINISHED], ids=lambda s: s.value
)
def test_a_new_session_of_the_same_incarnation_begins_anew(state):
    """Nothing of the old session counts any more; the place is kept where it fits."""
    court = COURTS[state]()
    court.hello("a", place=(0, 2)) if state is CoordinatorState.WAITING else None
    court.hello("a", place=(0, 2))
    volunteer = court.core.members.volunteers["a"]
    assert (volunteer.life_cycle, volunteer.place) == (LifeCycle.JOINING, (0, 2))
    assert court.sent["a", "welcome"].member
    if state in (CoordinatorState.TRAINING, CoordinatorState.REDUCING):
        assert court.core.state is CoordinatorState.TRAINING
        assert court.sent["b", "gone"].peers == ("a",)


def test_a_sole_holder_that_comes_back_as_a_new_session_takes_the_run_back():
    court = Court().begin("a")
    court.commit("a")
    effects = court.hello("a", place=(0, 2))
    assert kinds(effects) == ["gone", "rollback"]
    assert court.sent["a", "welcome"].version == 0


def test_a_ready_that_does_not_prove_its_whole_place_is_not_believed():
    court = Court()
    court.prepare("a")
    held = (m.Held(block=0, version=0, digest="state 0"),)
    assert court.tell("a", m.Ready(line=court.line, version=0, held=held)) == []
    old = tuple(m.Held(block=b, version=7, digest="") for b in (0, 1))
    assert court.tell("a", m.Ready(line=court.line, version=0, held=old)) == []
    assert court.core.state is CoordinatorState.SYNCING


def test_bits_that_differ_from_the_checkpoint_are_fenced():
    court = training()
    court.commit("a", "b")
    court.commit("a", "b")
    court.save()
    court.tell("a", m.Farewell())
    court.tell("b", m.Farewell())
    court.prepare("c")
    assert court.sent["c", "fetch"].digests == {0: "state 0", 1: "state 1"}
    assert court.told("c", court.ready("c", digest="wrong")) == ["fenced"]


def test_a_voter_that_missed_the_commit_is_told_on_which_line_it_was_decided():
    court = Court().begin("a", "b")
    court.commit("a", "b")
    again = Court(court.records)
    again.hello("a", place=(0, 2), held=(m.Held(block=0, version=0, digest=""),))
    commit = again.sent["a", "welcome"].commit
    assert (commit.line, commit.step, commit.plan) == (court.line, 0, 1)


def test_who_comes_after_the_end_is_told_how_it_ended():
    court = finished()
    told, _ = court.hello("z")
    assert (told.message.kind, told.message.completed) == ("finished", True)
    halted = halted_court()
    told, _ = halted.hello("z")
    assert (told.message.completed, "non-finite" in told.message.why) == (False, True)
