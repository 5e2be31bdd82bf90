"""Holders that report what no honest one does: it counts for nothing, and does not set the whole step in motion."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.decisions import Halt, Send, State
from hetpeer.bootstrap.ledger import MAX_REOPENED
from hetpeer.bootstrap.training import MAX_FAILURES
from hetpeer.dht.errors import ProtocolError
from tests.bootstrap.court import BLOCKS, Court, failed

IDS = range(40)


@pytest.fixture
def court():
    return Court(sizes=(1,) * len(IDS)).begin("a", "b")


def part(ids, begin=0, end=BLOCKS):
    return m.Contents(begin=begin, end=end, ids=tuple(ids))


def report(court, peer, *contents, slot=0, losses=None):
    losses = {i: 1.0 for one in contents for i in one.ids} if losses is None else losses
    return court.tell(peer, m.Sealed(line=court.line, step=0, slot=slot, contents=contents, losses=losses))


def tasks(effects):
    """How many microbatches are handed out again."""
    return sum(
        len(x.message.tasks) for x in effects if isinstance(x, Send) and isinstance(x.message, m.Reroute)
    )


@pytest.mark.parametrize(
    "contents",
    [
        (part([*IDS, 1000]),),
        (part((0, 1, 1)),),
        (part((0,)), part((1,))),
        (part((0,), 1, 2), part((0,), 0, 1)),
        (part((0,), 1, 1),),
    ],
    ids=["an id of no step", "an id twice", "blocks twice", "blocks backwards", "no blocks"],
)
def test_a_report_that_no_honest_holder_makes_is_an_offence_and_changes_nothing(court, contents):
    court.sent.clear()
    with pytest.raises(ProtocolError) as caught:
        report(court, "a", *contents)
    assert caught.value.peer == "a"
    assert not court.sent
    assert court.core._steps.first.ledger.undone() == set(IDS)
    report(court, "a", part(IDS))
    assert court.core.state is State.REDUCING, "the same slot, as it should be"


def test_losses_of_other_ids_are_an_offence_too(court):
    with pytest.raises(ProtocolError):
        report(court, "a", part((0,)), losses={0: 1.0, 1000: 1.0})


def test_reports_that_are_refused_again_and_again_open_an_id_a_few_times(court):
    """As of one who leaves the losses out: without a bound each would hand out everything."""
    handed = [tasks(report(court, "a", part(IDS, 1, 2), slot=slot, losses={})) for slot in range(50)]
    assert handed == [len(IDS)] * MAX_REOPENED + [0] * (50 - MAX_REOPENED)
    court.sent.clear()
    for _ in range(int(court.core._reign.config.stall_s) + 1):
        for peer in "ab":
            court.tell(peer, m.Heartbeat())
        court.tick(1.0)
    assert {kind for _, kind in court.sent} == {"reroute"}, "they are handed out when nothing is counted"


def test_the_books_keep_one_slot_of_each_holder(court):
    for slot in range(100):
        report(court, "a", part((slot % 40,)), slot=slot)
    assert len(court.core._steps.first.ledger._settled) == 1
    assert report(court, "a", part((0,)), slot=7) == [], "one that is past"
    again = report(court, "a", part((0,)), slot=99)
    assert [type(effect.message) for effect in again] == [m.Settled], "the last one, as it may not have heard"


def test_failures_are_heard_a_few_times_of_each_and_not_of_what_is_counted(court):
    for _ in range(MAX_FAILURES):
        assert tasks(failed(court, "a")) == 1
    assert [failed(court, "a") for _ in range(50)] == [[]] * 50
    assert len(court.core._steps.first._failures[0]) == MAX_FAILURES
    report(court, "b", part((1,)))
    assert failed(court, "a", microbatch=1) == []
    assert failed(court, "a", microbatch=1000) == []


def unusable(court, peer, given, microbatch=0):
    told = m.Failed(line=court.line, step=0, id=microbatch, why="input: not finite", given=given)
    return court.tell(peer, told)


def test_who_sends_rubbish_is_gone_around_and_halts_nothing():
    """One that sends NaN to everybody would be three failures at once."""
    court = Court(layouts=(((0, 1), (1, 2)),)).begin("a", "b", "c", "d", "e", "f")
    places = {peer: one.place for peer, one in court.core.members.volunteers.items()}
    first, second = (sorted(peer for peer in places if places[peer] == place) for place in ((0, 1), (1, 2)))
    assert len(first) == len(second) == 3
    liar = court.core._steps.first._ways._routes[0][0].peer
    for peer in second:
        effects = unusable(court, peer, liar)
        assert not [effect for effect in effects if isinstance(effect, Halt)]
        (task,) = [task for x in effects for task in x.message.tasks]
        assert task.route[0].peer in set(first) - {liar}
    assert court.core._steps.first.taken == {liar: 1}


def test_who_accuses_everybody_halts_nothing():
    court = Court().begin("a", "b", "c")
    effects = [unusable(court, "a", given) for given in ("b", "c", "a", "nobody", "b", "c")]
    assert court.core.state is not State.FINISHED
    assert [bool(told) for told in effects] == [True] * MAX_FAILURES + [False] * 3
