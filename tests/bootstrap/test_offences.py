"""Holders that report what no honest one does: it does not count, and does not disturb the whole step."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.step_failures import MAX_FAILURES
from hetpeer.bootstrap.coordinator.step_ledger import MAX_REOPENED
from hetpeer.bootstrap.state.effects import CoordinatorState, Halt, Send
from hetpeer.bootstrap.state.failed_microbatches import (
    ALONE,
    ENOUGH,
    LONE,
    FailedMicrobatch,
    Failures,
    room_s,
)
from hetpeer.bootstrap.state.volunteer_state import LifeCycle
from hetpeer.dht.base.errors import ProtocolError
from tests.bootstrap.court import BLOCKS, Court, failed, kinds, one_each, sole_holder

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
    """Microbatches that are handed out again."""
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
    assert court.core.machine.steps.first.ledger.undone() == set(IDS)
    report(court, "a", part(IDS))
    assert court.core.state is CoordinatorState.REDUCING, "the same slot, as it should be"


def test_losses_of_other_ids_are_an_offence_too(court):
    with pytest.raises(ProtocolError):
        report(court, "a", part((0,)), losses={0: 1.0, 1000: 1.0})


def test_reports_that_are_refused_again_and_again_open_an_id_a_few_times(court):
    """For instance without losses: without a bound each report would hand out everything."""
    handed = [tasks(report(court, "a", part(IDS, 1, 2), slot=slot, losses={})) for slot in range(50)]
    assert handed == [len(IDS)] * MAX_REOPENED + [0] * (50 - MAX_REOPENED)
    court.sent.clear()
    for _ in range(int(court.core._context.config.stall_s) + 1):
        for peer in "ab":
            court.tell(peer, m.Heartbeat())
        court.tick(1.0)
    assert {kind for _, kind in court.sent} == {"reroute"}, "they are handed out when nothing is counted"


def test_the_books_keep_one_slot_of_each_holder(court):
    for slot in range(100):
        report(court, "a", part((slot % 40,)), slot=slot)
    assert len(court.core.machine.steps.first.ledger._settled) == 1
    assert report(court, "a", part((0,)), slot=7) == [], "one that is past"
    again = report(court, "a", part((0,)), slot=99)
    assert [type(effect.message) for effect in again] == [m.Settled], "the last one, as it may not have heard"


def test_failures_are_heard_a_few_times_of_each_and_not_of_what_is_counted(court):
    for _ in range(MAX_FAILURES):
        assert tasks(failed(court, "a")) == 1
    assert [failed(court, "a") for _ in range(50)] == [[]] * 50
    assert len(court.core.machine.steps.first.failures._known[0]) == MAX_FAILURES
    report(court, "b", part((1,)))
    assert failed(court, "a", microbatch=1) == []
    assert failed(court, "a", microbatch=1000) == []


def unusable(court, peer, given, microbatch=0):
    told = m.Failed(line=court.line, step=0, id=microbatch, why="input: not finite", given=given)
    return court.tell(peer, told)


def test_who_sends_rubbish_is_gone_around_and_halts_nothing():
    """One that sends NaN to everybody would cause three failures at once."""
    court = Court(layouts=(((0, 1), (1, 2)),)).begin("a", "b", "c", "d", "e", "f")
    places = {peer: one.place for peer, one in court.core.members.volunteers.items()}
    first, second = (sorted(peer for peer in places if places[peer] == place) for place in ((0, 1), (1, 2)))
    assert len(first) == len(second) == 3
    ways = court.core.machine.steps.first._ways
    liar = ways._routes[0][0].peer
    ways._been[0].update(second)  # where its links are down it sends it to another peer each time
    for peer in second:
        effects = unusable(court, peer, liar)
        assert not [effect for effect in effects if isinstance(effect, Halt)]
        (task,) = [task for x in effects for task in x.message.tasks]
        assert task.route[0].peer in set(first) - {liar}
    assert court.core.machine.steps.first.blamed() == {liar: 1}


def way(court, microbatch):
    return tuple(hop.peer for hop in court.core.machine.steps.first._ways._routes[microbatch])


def two_by_two():
    """Both ids go from a liar to a victim; another peer has the victim's block, too."""
    court = Court(layouts=(((0, 1), (1, 2)),), steps=8).begin("a", "b", "c", "d")
    ways = court.core.machine.steps.first._ways
    liar, victim = way(court, 0)
    for microbatch in (0, 1):
        ways._on(microbatch, ways._routes[0])
    places = {peer: one.place for peer, one in court.core.members.volunteers.items()}
    (other,) = [peer for peer in places if places[peer] == places[victim] and peer != victim]
    return court, liar, victim, other


def test_what_came_by_a_way_that_nobody_ordered_is_no_failure_and_nothing_passes_there_any_more():
    """A sender whose link is refused goes around it without asking.

    Once the coordinator ignored its next victim, because the id was not routed there. The victim refused the
    sender as well, and ids from one to the other stood still for two timeouts.
    """
    court, liar, victim, other = two_by_two()
    court.core.machine.steps.first._ways._been[0].clear()
    assert unusable(court, other, liar) == [], "no id was to pass there"
    assert not court.core.machine.steps.first.failures._known
    court.core.machine.steps.first._ways._been[0].update(way(court, 0))
    assert unusable(court, victim, liar)
    assert liar not in way(court, 0) + way(court, 1)


def test_nothing_is_sent_to_who_does_not_work_with_its_sender():
    court, liar, victim, other = two_by_two()
    effects = court.tell(victim, m.Shuns(peers=(liar,)))
    assert {task.id for effect in effects for task in effect.message.tasks} == {0, 1}
    assert (liar, victim) not in (way(court, 0), way(court, 1))
    assert court.tell(victim, m.Shuns(peers=(liar,))) == [], "which is known"
    court.tell(other, m.Shuns(peers=(liar,)))
    assert liar not in way(court, 0) + way(court, 1)
    court.commit("a", "b", "c", "d")
    assert liar not in way(court, 0) + way(court, 1), "in the next step either"
    court.tell(victim, m.Shuns())
    court.tell(other, m.Shuns())
    court.commit("a", "b", "c", "d")
    assert liar in way(court, 0) + way(court, 1)


def test_who_accuses_everybody_halts_nothing():
    court = Court().begin("a", "b", "c")
    effects = [unusable(court, "a", given) for given in ("b", "c", "a", "nobody", "b", "c")]
    assert court.core.state is not CoordinatorState.FINISHED
    assert [bool(told) for told in effects] == [True] * MAX_FAILURES + [False] * 3


# ── what nobody can compute ─────────────────────────────────────────────────────────────────────────────────

STAGES = (((0, 1), (1, 2)),)
SYNC_S = 60.0
MOVED_S = 6.0
"""Then the run rolls back for a redundant volunteer, or moves it."""


def halts(effects):
    return [effect for effect in effects if isinstance(effect, Halt)]


def later(court, seconds, *peers):
    """Let time pass while `peers` live. Returns what happens meanwhile."""
    effects, until = [], court.now + seconds
    while court.now < until:
        for peer in peers:
            court.tell(peer, m.Heartbeat())
        effects += court.tick(1.0)
    return effects


def test_two_that_say_that_all_others_are_to_blame_halt_nothing():
    """Each also fails itself, and together they blame everybody else."""
    court = Court().begin(*"abcde")
    ways = court.core.machine.steps.first._ways
    one = ways._routes[0][0].peer
    other, *honest = [peer for peer in "abcde" if peer != one]
    ways._been[0][other] += 1
    for peer, given in (
        (one, one),
        (one, one),
        (one, honest[0]),
        *((other, x) for x in (other, *honest[1:])),
    ):
        assert not halts(unusable(court, peer, given))
    assert court.core.state is CoordinatorState.TRAINING
    handed = ways._routes[0][0].peer
    assert handed in honest
    court.sealed(handed, (0,))
    court.sealed(next(peer for peer in honest if peer != handed), (1,))
    assert court.core.state is CoordinatorState.REDUCING


def test_one_of_two_that_fails_always_makes_nothing_of_the_other_failing_once():
    """It lacked memory for a moment."""
    court = Court().begin("a", "b")
    liar, honest = "a", "b"
    failed(court, liar)
    failed(court, honest)
    for _ in range(MAX_FAILURES - 1):
        assert not halts(failed(court, liar))
    assert court.core.machine.steps.first._ways._routes[0][0].peer == honest
    assert court.core.state is CoordinatorState.TRAINING


def test_a_failure_counts_only_of_whom_the_microbatch_may_have_come_to():
    court = Court().begin("a", "b", "c")
    route = court.core.machine.steps.first._ways._routes[0]
    (elsewhere, *_) = [peer for peer in "abc" if peer != route[0].peer]
    assert failed(court, elsewhere) == []
    assert court.core.machine.steps.first.failures._known == {}
    assert court.core.machine.steps.first._ways._routes[0] == route


def test_who_holds_a_block_in_place_of_somebody_who_has_left_may_fail_it():
    """The coordinator is not told of leftovers that went to it."""
    court = one_each()
    court.tell("b", m.Farewell())
    court.prepare("c")
    court.ready("c")
    assert court.core.machine.steps.first._ways._routes[0][1].peer == "b"
    told = m.Failed(line=court.line, step=court.core.step, id=0, why="non-finite")
    assert "reroute" in court.told("a", court.tell("c", told))


def others_come(court, *peers, besides=()):
    """Let others come: one of them is moved to the block without a holder.

    `besides` live on. Returns the one that was moved.
    """
    for _ in range(2):  # the run rolls back, all fetch the state again, and then one is moved
        later(court, MOVED_S, *peers, *besides)
        for peer in peers:
            court.tell(peer, m.Prepared())
        for peer in peers:
            court.ready(peer)
    assert court.core.state is CoordinatorState.TRAINING
    (moved,) = [peer for peer in peers if court.core.members.volunteers[peer].place == (1, 2)]
    return moved


def fails_alone(court, peer, microbatch=0):
    """Let `peer` fail as often as it is heard. Returns all that happens."""
    effects = [effect for _ in range(MAX_FAILURES) for effect in failed(court, peer, microbatch)]
    assert "fenced" in court.told(peer, effects) or halts(effects)
    return effects


def comes_back(court, peer, place, incarnation):
    court.hello(peer, incarnation=incarnation, place=place)
    court.tell(peer, m.Prepared())


def test_a_sole_holder_that_fails_makes_room_and_somebody_else_goes_on():
    court = sole_holder("c", sync_s=SYNC_S)
    fails_alone(court, "b")
    assert court.core.state is not CoordinatorState.FINISHED
    court.sent.clear()
    comes_back(court, "b", (1, 2), incarnation=2)
    moved = others_come(court, "a", "c", besides="b")
    assert "b" in court.core.members.volunteers
    assert ("b", "fetch") not in court.sent, "its place is free for others first"
    assert court.sent["a", "begin"].roster == {"a": (0, 1), "c": (0, 1)} | {moved: (1, 2)}
    for peer in "ac":
        court.sealed(peer, (0, 1), blocks=court.core.members.volunteers[peer].place)
    effects = [effect for peer in "ac" for effect in court.vote(peer)]
    assert "commit" in kinds(effects)


def test_a_sole_holder_is_asked_again_when_it_has_made_room_for_a_while():
    court = sole_holder(sync_s=SYNC_S)
    fails_alone(court, "b")
    comes_back(court, "b", (1, 2), incarnation=2)
    court.tell("a", m.Prepared())
    court.ready("a")
    later(court, room_s(court.core._context.config) - 5.0, "a", "b")
    court.sent.pop(("b", "fetch"), None)
    later(court, 10.0, "a", "b")
    court.ready("b")
    assert "b" in court.sent["a", "begin"].roster
    assert court.core.state is CoordinatorState.TRAINING


def test_it_says_so_at_once_that_it_has_the_state_and_has_to_wait_all_the_same():
    court = sole_holder(sync_s=SYNC_S)
    fails_alone(court, "b")
    court.hello("b", incarnation=2, place=(1, 2), held=(m.Held(block=1, version=0, digest=""),))
    court.ready("b")
    assert court.core.missing_blocks == [1]
    assert court.core.members.volunteers["b"].life_cycle is LifeCycle.PREPARED


def test_a_model_that_nobody_can_compute_ends_the_run_once_others_have_tried():
    """One volunteer after another holds the block, and fails."""
    court = sole_holder("c", "d", "e", sync_s=SYNC_S)
    everybody = ["a", "c", "d", "e"]
    holder, tried = "b", []
    while not (ended := halts(fails_alone(court, holder))):
        tried.append(holder)
        holder = others_come(court, *everybody)
        everybody = [peer for peer in everybody if peer != holder]
    assert len({*tried, holder}) == ENOUGH
    assert "microbatch 0 of step 0 failed 3 times: non-finite" in ended[0].why


def test_whatever_is_said_of_a_failure_can_be_said_to_others():
    """The longest allowed text, and what the coordinator adds to it."""
    court = Court().begin("a", "b")
    for peer in "abab":
        ended = court.tell(peer, m.Failed(line=court.line, step=0, id=0, why="x" * m.MAX_TEXT))
    assert len(halts(ended)) == 1
    assert court.sent["a", "finished"].why.startswith("microbatch 0 of step 0 failed")


def test_two_without_anybody_who_could_be_moved_there_end_it():
    court = Court().begin("a", "b")
    assert [bool(halts(failed(court, peer))) for peer in "abab"] == [False, False, False, True]
    court = Court(layouts=STAGES).begin("a", "b", "c", "d", "e")
    seconds = [peer for peer, one in court.core.members.volunteers.items() if one.place == (1, 2)]
    assert len(seconds) == 2
    court.core.machine.steps.first._ways._been[0].update(seconds)
    effects = [effect for peer in (*seconds, *seconds) for effect in failed(court, peer)]
    assert not halts(effects), "one of the three others can be spared"
    assert set(seconds).isdisjoint(court.core.members.volunteers)


@pytest.mark.parametrize(
    ("visitor", "rooms"), [("", LONE), ("b", ALONE)], ids=["nobody else, ever", "somebody was there"]
)
def test_one_that_fails_alone_ends_it_as_nobody_comes(visitor, rooms):
    """A run of one volunteer whose loss is not finite: it is told why in the end, and soon if nobody else was
    ever there.
    """
    court = Court(sync_s=SYNC_S).begin("a")
    if visitor:
        court.hello(visitor)
        court.tell(visitor, m.Farewell())
    began, turns, ended = court.now, 0, []
    while not ended:
        ended, turns = halts(fails_alone(court, "a")), turns + 1
        comes_back(court, "a", (0, 2), incarnation=1 + turns)
        while not ended and court.core.state is not CoordinatorState.TRAINING:
            later(court, 1.0, "a")
            court.ready("a")
    assert court.now - began == pytest.approx(rooms * room_s(court.core._context.config), abs=10.0)
    assert turns == rooms + 1
    assert "non-finite" in ended[0].why


def failure_of(*holders):
    return FailedMicrobatch(batch=0, id=0, blocks=(0,), holders=holders, times=3, step=0, what="non-finite")


def test_one_of_several_pipelines_is_not_alone_though_nobody_else_is_in_it():
    failure, minutes = failure_of("a"), 140.0
    for elsewhere, final in ((None, True), (lambda: False, False)):
        failures = Failures(elsewhere)
        failures.met("a")
        assert not failures.are_final(failure, minutes, 0.0, replaceable=False)
        assert failures.are_final(failure, minutes, LONE * minutes, replaceable=False) is final


def test_what_was_committed_after_all_is_held_against_nobody():
    court = sole_holder("c", sync_s=SYNC_S)
    fails_alone(court, "b")
    assert court.core._context.failures._failed
    others_come(court, "a", "c")
    for peer in "ac":
        court.sealed(peer, (0, 1), blocks=court.core.members.volunteers[peer].place)
    for peer in "ac":
        court.vote(peer)
    assert court.core.history.version == 1
    assert not court.core._context.failures._failed


def test_a_successor_knows_of_no_failures_and_halts_nothing_because_of_them():
    court = sole_holder(sync_s=SYNC_S)
    fails_alone(court, "b")
    again = Court(court.records, layouts=STAGES, sync_s=SYNC_S)
    assert "b" not in again.core._context.failures.resting
    assert again.core.state is CoordinatorState.WAITING
