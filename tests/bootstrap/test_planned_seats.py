"""Seats of a plan: given to the volunteers that it names, kept free for them for a while."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.membership import BlockDemand
from hetpeer.bootstrap.state.planned_seats import HELD_S
from hetpeer.peer.planning.replan import to_seats
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from tests.bootstrap.court import Court
from tests.bootstrap.test_seat_plan import plan

TWO = plan([("attic", 0, 1), ("shed", 1, 2)], [("loft", 0, 1), ("barn", 1, 2)])
COST = BlockDemand(elements=10, memory=PlaceDemand(activations=100), flops=1.0)


def court(given=TWO, records=(), **changes):
    return Court(records, plan=given, layouts=(((0, 2),),), costs=[COST] * 2, **changes)


def offered(judge, peer):
    """The open places that `peer` was offered: (cluster, begin, end)."""
    return [(p.cluster, p.begin, p.end) for p in judge.sent[peer, "welcome"].places if p.open]


def come(judge, peer, name=None, **facts):
    """`peer` joins under a name. Returns what it is offered."""
    judge.hello(peer, name=peer if name is None else name, **facts)
    return offered(judge, peer)


def take(judge, peer, cluster, begin, end):
    return judge.told(peer, judge.tell(peer, m.Claim(cluster=cluster, begin=begin, end=end)))


def remarks(judge):
    return list(judge.core.seats.remarks(judge.now))


def test_named_volunteers_are_offered_their_places_alone_in_any_order():
    judge = court()
    assert come(judge, "barn") == [(1, 1, 2)]
    assert take(judge, "barn", 1, 1, 2) == ["granted"]
    assert come(judge, "attic") == [(0, 0, 1)]
    assert come(judge, "shed") == [(0, 1, 2)]
    assert remarks(judge) == []
    assert judge.records[-1]["kind"] == "planned"


def test_others_choose_among_what_is_not_reserved():
    judge = court()
    assert come(judge, "zoe") == [(2, 0, 2)]
    assert take(judge, "zoe", 0, 0, 1) == ["refused"]
    assert take(judge, "zoe", 2, 0, 2) == ["granted"]


def test_the_place_of_one_that_does_not_come_is_open_to_others_after_a_while():
    judge = court()
    for peer, place in (("attic", (0, 0, 1)), ("shed", (0, 1, 2)), ("loft", (1, 0, 1))):
        come(judge, peer)
        take(judge, peer, *place)
        judge.tell(peer, m.Prepared())
    for _ in range(int(HELD_S)):
        assert judge.core.seats.holds(judge.now)
        for peer in ("attic", "shed", "loft"):
            judge.tell(peer, m.Heartbeat())
        judge.tick(1.0)
    judge.tick(1.0)
    assert not judge.core.seats.holds(judge.now)
    assert remarks(judge) == ["barn is not there: its place (pipeline 1, block 1) is open to others"]
    assert (1, 1, 2) in come(judge, "zoe")
    assert take(judge, "zoe", 1, 1, 2) == ["granted"]
    assert (1, 1, 2) not in come(judge, "barn")
    assert take(judge, "barn", 2, 0, 2) == ["granted"]
    assert remarks(judge) == ["barn is not at its place (pipeline 1, block 1): it has blocks 0 to 1"]


def test_of_two_with_one_name_the_first_has_the_place():
    judge = court()
    assert come(judge, "one", "attic") == [(0, 0, 1)]
    assert come(judge, "two", "attic") == [(2, 0, 2)]
    (said,) = remarks(judge)
    assert said.startswith("2 volunteers are called attic: …one came first and has its place")
    judge.tell("one", m.Farewell())
    assert come(judge, "two", "attic") == [(0, 0, 1)]


def test_a_peer_id_counts_more_than_a_name():
    judge = court(plan([("attic", 0, 2)]).model_copy(update={"pipelines": _with_peer("two")}))
    assert come(judge, "one", "attic") == [(1, 0, 2)]
    assert come(judge, "two", "attic") == [(0, 0, 2)]
    assert remarks(judge) == []


def _with_peer(peer):
    return ((plan([("attic", 0, 2)]).pipelines[0][0].model_copy(update={"peer": peer}),),)


def test_one_with_too_little_memory_takes_another_place():
    judge = court(plan([("attic", 0, 2)], [("shed", 0, 1), ("loft", 1, 2)]))
    little = {"memory_bytes": 150}
    assert (0, 0, 2) in come(judge, "attic", **little)  # it is open to it, and it sees that it does not fit
    judge.core.members.volunteers["attic"].cluster = 1
    judge.core.members.volunteers["attic"].place = (0, 1)
    assert remarks(judge) == [
        "attic has too little memory for its place (pipeline 0, blocks 0 to 1): it takes another"
    ]
    assert judge.core.seats.moves() == {}


def test_a_new_coordinator_knows_the_plan_and_an_old_one_is_not_enacted_twice():
    judge = court()
    again = court(None, judge.records)
    assert again.core.seats.plan == TWO
    assert come(again, "loft") == [(1, 0, 1)]
    once = court(TWO, judge.records)
    assert [record["kind"] for record in once.records].count("planned") == 1


def test_a_plan_ends_when_blocks_are_divided_otherwise():
    judge = court()
    ended = [*judge.records, {"kind": "arranged", "layouts": [[[0, 2]]]}]
    again = court(TWO, ended)
    assert again.core.seats.plan is None
    assert again.core.seats.holds(again.now) is False
    assert come(again, "loft") == [(0, 0, 2)]


def working():
    """A court of two that work, and its log: `attic` has block 0 of cluster 0, `shed` block 1."""
    judge = Court(layouts=(((0, 1), (1, 2)),), costs=[COST] * 2)
    for peer, place in (("attic", (0, 0, 1)), ("shed", (0, 1, 2))):
        come(judge, peer)
        take(judge, peer, *place)
        judge.tell(peer, m.Prepared())
    return judge.begin_prepared("attic", "shed")


SWAPPED = plan([("shed", 0, 1), ("attic", 1, 2)])


def test_a_plan_for_a_run_that_goes_on_moves_volunteers_and_loses_nothing():
    before = working()
    before.commit("attic", "shed")
    judge = Court(before.records, plan=SWAPPED, layouts=(((0, 1), (1, 2)),), costs=[COST] * 2)
    for peer, place in (("attic", (0, 1)), ("shed", (1, 2))):
        held = (m.Held(block=place[0], version=1, digest=f"state {place[0]}"),)
        judge.hello(peer, incarnation=2, name=peer, place=place, held=held)
        assert judge.sent[peer, "welcome"].member
        judge.tell(peer, m.Prepared())
    judge.begin_prepared("attic", "shed")
    assert judge.core.history.version == 1
    assert judge.core.seats.moves() == {"shed": (0, (0, 1)), "attic": (0, (1, 2))}
    arrangement = to_seats(judge.core.seats, judge.core.members)
    assert arrangement is not None
    assert arrangement.fault(2) is None
    judge.do(judge.core.arrange(arrangement, judge.now))
    judge.commit("attic", "shed")
    judge.save()
    assert judge.records[-1]["kind"] == "arranged"
    assert judge.records[-1]["plan"] == SWAPPED.id
    assert judge.core.seats.plan == SWAPPED
    assert judge.core.seats.moves() == {}
    assert {peer: v.place for peer, v in judge.core.members.volunteers.items()} == {
        "shed": (0, 1),
        "attic": (1, 2),
    }


def test_nobody_is_moved_to_a_place_that_another_keeps():
    judge = working()
    stays = plan([("zoe", 0, 1), ("attic", 1, 2)])
    judge.core.history.add({"kind": "planned", "id": stays.id, "layouts": (), "plan": stays.document()})
    judge.core.seats.look(judge.now)
    for volunteer in judge.core.members.volunteers.values():
        judge.core.seats.expect(volunteer, judge.now)
    assert judge.core.seats.moves() == {}
    assert to_seats(judge.core.seats, judge.core.members) is None


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
def test_a_coordinator_that_stood_still_keeps_seats_longer(pause_s):
    judge = court()
    judge.core.seats.excuse(pause_s)
    assert judge.core.seats.holds(judge.now + HELD_S - 1.0)
    assert judge.core.seats.holds(judge.now + HELD_S + 1.0) is (pause_s > 0)


def halves():
    """A court whose plan has two halves, both taken and at work."""
    judge = court(plan([("attic", 0, 1), ("shed", 1, 2)]))
    for peer, place in (("attic", (0, 0, 1)), ("shed", (0, 1, 2))):
        come(judge, peer)
        take(judge, peer, *place)
        judge.tell(peer, m.Prepared())
    return judge.begin_prepared("attic", "shed")


def test_one_that_is_not_in_the_plan_becomes_a_backup():
    judge = halves()
    come(judge, "zoe")
    take(judge, "zoe", 1, 0, 2)
    assert judge.sent["zoe", "granted"].backup
    assert judge.core.members.backups == {"zoe"}
    assert judge.records[-1] == {"kind": "backups", "peers": ["zoe"], "steps_in": []}
    assert to_seats(judge.core.seats, judge.core.members) is None


def test_it_works_as_long_as_nobody_else_has_its_blocks_and_is_a_backup_then():
    judge = court(plan([("attic", 0, 1), ("shed", 1, 2)]))
    come(judge, "zoe")
    take(judge, "zoe", 1, 0, 2)
    assert not judge.sent["zoe", "granted"].backup
    judge.tell("zoe", m.Prepared())
    judge.begin_prepared("zoe")
    for peer, place in (("attic", (0, 0, 1)), ("shed", (0, 1, 2))):
        come(judge, peer)
        take(judge, peer, *place)
        assert not judge.sent[peer, "granted"].backup
        assert to_seats(judge.core.seats, judge.core.members) is None  # not all blocks have another holder
        judge.core.members.volunteers[peer].work()
    found = to_seats(judge.core.seats, judge.core.members)
    assert found is not None
    assert (found.backups, found.plan) == ({"zoe"}, judge.core.seats.plan.id)
    assert found.fault(2) is None


def test_without_the_plan_newcomers_are_no_backups_of_it():
    judge = halves()
    judge.core.history.add({"kind": "arranged", "layouts": [[[0, 1], [1, 2]]]})
    come(judge, "zoe")
    take(judge, "zoe", *offered(judge, "zoe")[0])
    assert not judge.sent["zoe", "granted"].backup
