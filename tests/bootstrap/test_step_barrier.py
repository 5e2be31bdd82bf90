"""The step barrier: which volunteers are waited for, and which fill a gap."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.bootstrap.state.volunteer_state import LifeCycle
from tests.bootstrap.court import Court


def test_a_joiner_is_waited_for_but_not_for_ever():
    court = Court(sync_s=5.0).begin("a")
    court.prepare("b")
    court.commit("a")
    assert court.core.state is CoordinatorState.SYNCING
    assert court.sent["b", "fetch"].sources == {0: ("a",), 1: ("a",)}
    for _ in range(6):
        court.tell("a", m.Heartbeat())
        court.tell("b", m.Heartbeat())
        court.tick(1.0)
    assert (court.core.state, court.core.step) == (CoordinatorState.TRAINING, 1)
    court.commit("a")
    assert (court.core.state, court.sent["b", "fetch"].version) == (CoordinatorState.SYNCING, 2)


def test_who_never_gets_ready_is_waited_for_ever_less():
    court = Court(sync_s=8.0, steps=20).begin("a")
    court.prepare("b")
    waits = []
    for _ in range(7):
        court.commit("a")
        began = court.now
        while court.core.state is CoordinatorState.SYNCING:
            for peer in ("a", "b"):
                court.tell(peer, m.Heartbeat())
            court.tick()
        waits.append(court.now - began)
    assert waits == pytest.approx([8, 4, 2, 1, 0.5, 0, 0], abs=0.5)


def test_somebody_else_comes_where_somebody_has_a_place_and_never_works():
    """The state that it needs cannot be fetched, or it does so on purpose."""
    court = Court(layouts=(((0, 1), (1, 2)),), sync_s=2.0)
    for peer in ("a", "b", "c"):
        court.hello(peer)
        place = next(place for place in court.sent[peer, "welcome"].places if place.open)
        court.tell(peer, m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
    silent = next(p for p, v in court.core.members.volunteers.items() if v.place == (1, 2))
    others = [peer for peer in ("a", "b", "c") if peer != silent]
    for peer in others:
        court.tell(peer, m.Prepared())
        court.ready(peer)
    for _ in range(60):
        for peer in ("a", "b", "c"):
            court.tell(peer, m.Heartbeat())
        court.tick(0.5)
    assert [p for p in others if court.sent[p, "granted"].begin == 1] != []


def test_who_is_prepared_and_waits_for_the_border_is_counted_on():
    court = Court(sync_s=0.5).begin("a", "b")
    court.count("a")
    court.prepare("c")
    for _ in range(10):
        for peer in ("a", "b", "c"):
            court.tell(peer, m.Heartbeat())
        court.tick(0.5)
    newcomer = court.core.members.volunteers["c"]
    assert (newcomer.life_cycle, newcomer.slow) == (LifeCycle.PREPARED, False)


def test_a_gap_is_filled_by_somebody_redundant_once_the_state_can_be_had():
    court = Court(layouts=(((0, 1), (1, 2)),), checkpoint_every=1)
    for peer in ("a", "b", "c"):
        court.prepare(peer)
    places = {p: v.place for p, v in court.core.members.volunteers.items()}
    assert sorted(places.values()) == [(0, 1), (0, 1), (1, 2)]
    lonely = next(p for p, place in places.items() if place == (1, 2))
    court.tell(lonely, m.Farewell())
    others = [p for p in places if p != lonely]
    for peer in others:
        court.ready(peer)
    for _ in range(10):
        for peer in others:
            court.tell(peer, m.Heartbeat())
        court.tick(1.0)
    moved = [p for p in others if court.sent[p, "granted"].begin == 1]
    assert len(moved) == 1


def test_after_a_restart_holders_have_their_time_to_come_back():
    court = Court().begin("a", "b")
    court.commit("a", "b")
    again = Court(court.records)
    again.hello("a", place=(0, 2), held=(m.Held(block=0, version=1, digest=""),))
    assert (again.sent["a", "welcome"].member, again.sent["a", "welcome"].version) == (True, 1)
    again.ready("a")
    assert (again.core.state, again.core.step) == (CoordinatorState.TRAINING, 1)
    late = Court(court.records)
    late.hello("a")
    for _ in range(20):
        late.tell("a", m.Heartbeat())
        late.tick(1.0)
    assert late.records[-1]["kind"] == "rollback"


# ── who makes others wait on purpose ────────────────────────────────────────────────────────────────────────


def waited(court, *peers):
    """Seconds until the next step begins, while `peers` live."""
    began = court.now
    while court.core.state is CoordinatorState.SYNCING:
        for peer in peers:
            court.tell(peer, m.Heartbeat())
        court.tick()
    return court.now - began


def trained(court, seconds, *peers):
    """Let `a` commit a step that takes this long."""
    for _ in range(seconds):
        for peer in ("a", *peers):
            court.tell(peer, m.Heartbeat())
        court.tick(1.0)
    court.commit("a")


def test_another_session_does_not_make_others_wait_as_long_again():
    court = Court(sync_s=8.0, steps=20).begin("a")
    waits = []
    for session in range(7):
        court.hello("b", incarnation=2 + session)
        place = next(place for place in court.sent["b", "welcome"].places if place.open)
        court.tell("b", m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
        court.tell("b", m.Prepared())
        court.commit("a")
        waits.append(waited(court, "a", "b"))
    assert waits == pytest.approx([8, 4, 2, 1, 0.5, 0, 0], abs=0.5)


def test_who_says_that_it_was_late_for_what_it_was_not_told_to_fetch_is_not_waited_for():
    court = Court(sync_s=8.0, steps=20).begin("a")
    court.commit("a")
    court.count("a")  # nobody is told to fetch for this step any more
    court.prepare("b")
    assert ("b", "fetch") not in court.sent
    for _ in range(3):
        court.ready("b", version=0)
    court.vote("a")
    court.applied("a")
    assert court.core.members.volunteers["b"].missed == 0
    assert court.core.state is CoordinatorState.TRAINING


def test_however_many_come_and_are_not_ready_they_hold_up_a_share_of_the_time():
    court = Court(sync_s=10.0, steps=1000).begin("a")
    lost, training = 0.0, 0
    for number in range(60):
        court.prepare(f"stranger {number}")
        seconds = 10 if number else 1
        trained(court, seconds, f"stranger {number}")
        training += seconds
        lost += waited(court, "a", f"stranger {number}")
        court.tell(f"stranger {number}", m.Farewell())
    assert 10.0 < lost <= 20.0 + 0.1 * training + 1.0


def test_who_needs_a_long_wait_gets_it_though_others_waste_all_there_is():
    """It enters with the wait that it needs, not after waits that are too short for it."""
    court = Court(sync_s=10.0, steps=1000).begin("a")
    vain = 0
    while vain < 2:
        stranger = f"stranger {vain}"
        court.prepare(stranger)
        trained(court, 1, stranger)
        vain += waited(court, "a", stranger) > 0
    court.prepare("slow")
    for _ in range(40):
        trained(court, 4, "slow", stranger)
        if court.core.state is CoordinatorState.SYNCING:
            break
    for _ in range(9):  # its link needs this long
        for peer in ("a", "slow", stranger):
            court.tell(peer, m.Heartbeat())
        court.tick(1.0)
    assert court.core.state is CoordinatorState.SYNCING
    court.ready("slow")
    waited(court, "a", "slow", stranger)
    assert "slow" in court.sent["a", "begin"].roster


def test_who_takes_back_that_it_is_ready_rests_and_does_not_come_in_unasked():
    court = Court().begin("a", "b", "c")
    court.tell("b", m.Prepared())
    court.sent.pop(("b", "fetch"), None)
    court.ready("b")
    assert "b" not in court.core.working(), "not into the step that runs"
    court.tell("c", m.Farewell())
    court.prepare("c")  # waited for at the barrier
    court.commit("a")
    assert court.core.state is CoordinatorState.SYNCING
    court.ready("b")
    assert "b" not in court.core.working(), "nor into the next one"
    court.ready("c")
    assert court.sent["a", "begin"].roster == {"a": (0, 2), "c": (0, 2)}
    assert ("b", "fetch") not in court.sent
    court.commit("a", "c")
    court.ready("b")
    assert "b" in court.core.working(), "two commits later it is forgotten"
