"""Backups keep a place and take part in no step, until a block has no other volunteer."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.effects import CoordinatorState
from tests.bootstrap.court import Court, kinds

WHOLE, FRONT, BACK = (0, 2), (0, 1), (1, 2)
SPARED = Arrangement(((WHOLE,), (WHOLE,)), {"a": (0, WHOLE), "b": (1, WHOLE)}, None, frozenset({"b"}))
"""The first one works, the second one is a backup."""


def spare(court: Court, *others: str) -> Court:
    """Volunteers `a` and `b`, of which `b` becomes a backup at the next barrier."""
    court.begin("a", "b", *others)
    court.do(court.core.arrange(SPARED, court.now))
    court.commit("a", "b", *others)
    court.save()
    court.tell("b", m.Prepared())
    return court


def fetched(court: Court, peer: str = "b", version: int | None = None, digest: str = "state"):
    """`peer` is told what to fetch behind the step, and has it after a second."""
    court.tick()
    order = court.sent[peer, "fetch"]
    assert order.backup
    court.tick(1.0)
    return court.ready(peer, order.version if version is None else version, digest)


def alive(court: Court, seconds: float, *peers: str):
    """Let time pass in which `peers` are heard."""
    effects = []
    for _ in range(round(seconds)):
        for peer in peers:
            court.tell(peer, m.Heartbeat())
        effects += court.tick(1.0)
    return effects


def test_a_backup_is_in_no_roster_and_the_log_names_it():
    court = spare(Court(steps=9))
    assert court.sent["b", "granted"].backup
    assert court.sent["a", "begin"].roster == {"a": WHOLE}
    assert [r["backups"] for r in court.records if r["kind"] == "arranged"] == [["b"]]
    court.commit("a")
    assert court.core.history.version == 2


def test_it_keeps_what_it_holds_and_later_fetches_a_checkpoint_from_reliable_peers():
    court = spare(Court(steps=9))
    court.tick(1.0)
    assert ("b", "fetch") not in court.sent or not court.sent["b", "fetch"].backup  # it has version 1
    court.commit("a")
    court.save()
    court.tick()
    order = court.sent["b", "fetch"]
    assert (order.version, order.backup, order.sources) == (2, True, {0: (), 1: ()})
    assert order.digests == {0: "state 0", 1: "state 1"}


def test_it_is_told_one_thing_at_a_time_and_rests_three_times_as_long_as_a_fetch_took():
    court = spare(Court(steps=99, checkpoint_every=1))
    court.commit("a")
    court.save()
    began = court.now
    fetched(court)
    took = court.now - began
    court.commit("a")
    court.save()
    court.sent.pop(("b", "fetch"))
    alive(court, 2.0, "a", "b")
    assert ("b", "fetch") not in court.sent
    alive(court, 3 * took, "a", "b")
    assert court.sent["b", "fetch"].version == 3


def test_the_next_term_knows_the_backups():
    court = spare(Court(steps=9))
    again = Court(court.records, steps=9)
    for peer in ("a", "b"):
        again.hello(peer, place=WHOLE, held=tuple(m.Held(block=b, version=1, digest="x") for b in range(2)))
        again.ready(peer)
    assert again.sent["b", "welcome"].backup
    assert again.sent["a", "begin"].roster == {"a": WHOLE}


def test_one_that_steps_in_is_no_backup_in_the_next_term():
    court = spare(Court(steps=9))
    court.tell("a", m.Farewell())
    court.tick()
    assert [r["steps_in"] for r in court.records if r["kind"] == "backups"] == [["b"]]
    assert History.of(court.records).backups == frozenset()
    assert not court.sent["b", "fetch"].backup
    court.ready("b")
    assert court.sent["b", "begin"].roster == {"b": WHOLE}


def test_no_step_notices_the_death_of_a_backup():
    court = spare(Court(steps=9))
    effects = court.tell("b", m.Farewell())
    assert kinds(effects) == ["gone"]
    assert court.told("a", effects) == []


def test_the_last_holder_dies_and_a_backup_with_the_version_goes_on_with_the_step():
    court = warm(Court(steps=9))
    court.tell("a", m.Farewell())
    court.tick()
    court.ready("b")
    assert court.core.step == 3
    assert [r["to_version"] for r in court.records if r["kind"] == "rollback"] == [3]  # it began with that
    court.commit("b")
    assert court.core.history.version == 4


def test_a_backup_that_says_something_else_once_it_is_needed_is_not_believed():
    court = warm(Court(steps=9))
    court.tell("a", m.Farewell())
    court.tick()
    court.ready("b", digest="another state")
    alive(court, 100.0, "b")
    assert [r["to_version"] for r in court.records if r["kind"] == "rollback"] == [3, 2]


def test_a_state_that_no_holder_confirms_is_no_copy():
    court = long_step(Court(steps=9))
    fetched(court, digest="another state")
    court.tell("a", m.Farewell())
    assert [record["to_version"] for record in court.records if record["kind"] == "rollback"] == [2]


def test_it_is_asked_to_fetch_nothing_from_holders_that_takes_long_beside_a_step():
    court = spare(Court(steps=9))
    court.commit("a")
    court.save()
    fetched(court)
    court.commit("a")  # it has taken no time
    alive(court, 30.0, "a", "b")
    assert court.sent["b", "fetch"].version == 2


def test_who_comes_back_without_its_place_is_no_backup_any_more():
    court = spare(Court(steps=9))
    court.tell("b", m.Farewell())
    court.prepare("b")
    assert not court.sent["b", "granted"].backup
    assert History.of(court.records).backups == frozenset()


def test_a_plan_does_without_a_backup_that_leaves_but_not_without_others():
    for peer, arranged in (("b", 1), ("a", 0)):
        court = Court(steps=9).begin("a", "b", "c")
        seats = {"a": (0, WHOLE), "b": (1, WHOLE), "c": (2, WHOLE)}
        plan = Arrangement(((WHOLE,),) * 3, seats, None, frozenset({"b"}))
        court.do(court.core.arrange(plan, court.now))
        court.tell(peer, m.Farewell())
        court.commit(*sorted({"a", "b", "c"} - {peer}))
        if arranged:
            court.save()
        assert sum(record["kind"] == "arranged" for record in court.records) == arranged


@pytest.mark.parametrize(
    ("backups", "fault"),
    [({"a"}, "block 0 has backups alone"), ({"a", "c"}, "c is a backup without a place")],
)
def test_an_arrangement_whose_backups_do_not_fit_is_refused(backups, fault):
    halves = Arrangement(((FRONT, BACK),), {"a": (0, FRONT), "b": (0, BACK)}, None, frozenset(backups))
    with pytest.raises(ValueError, match=fault):
        Court().begin("a", "b").core.arrange(halves, 100.0)


def long_step(court: Court) -> Court:
    """A fetch has taken about a second, a step half a minute; the one that runs began at version 3."""
    spare(court)
    court.commit("a")
    court.save()
    fetched(court)
    alive(court, 30.0, "a", "b")
    court.commit("a")
    assert court.core.state is CoordinatorState.TRAINING
    return court


def warm(court: Court) -> Court:
    """As above, and the backup has that version."""
    long_step(court)
    fetched(court)
    assert court.sent["b", "fetch"].sources == {0: ("a",), 1: ("a",)}
    assert court.core.members.volunteers["b"].has(3)
    return court


def waits(court: Court, *alive_peers: str) -> tuple[int, bool]:
    """Seconds until the run goes back to the checkpoint, and whether the backup is at work a second later."""
    for seconds in range(100):
        if [r for r in court.records if r["kind"] == "rollback" and r["to_version"] == 2]:
            court.ready("b", 2, digest="state")
            return seconds, court.core.state is CoordinatorState.TRAINING
        alive(court, 1, *alive_peers)
    pytest.fail("the run waits")


@pytest.mark.parametrize(
    ("closed", "warm", "seconds"), [(True, True, (8, 10)), (True, False, (30, 36)), (False, True, (40, 46))]
)
def test_a_holder_is_waited_for_shortly_if_its_stream_was_closed_and_a_backup_has_the_checkpoint(
    closed, warm, seconds
):
    """Otherwise as long as the steps since then took: half a minute, after ten seconds of silence."""
    court = long_step(Court(steps=9))
    if not warm:
        court.core.members.volunteers["b"].copied = None
    if closed:
        court.core.broken("a", court.now)
    waited, at_work = waits(court, "b")
    assert seconds[0] <= waited <= seconds[1]
    assert at_work


def test_a_holder_that_was_only_cut_off_comes_back_in_time():
    court = long_step(Court(steps=9))
    court.core.broken("a", court.now)
    alive(court, 5, "b")
    held = tuple(m.Held(block=block, version=3, digest="state") for block in range(2))
    court.hello("a", place=WHOLE, held=held)
    court.ready("a", 3)
    alive(court, 60, "a", "b")
    assert not [r for r in court.records if r["kind"] == "rollback" and r["to_version"] == 2]
    assert court.core.step == 3
