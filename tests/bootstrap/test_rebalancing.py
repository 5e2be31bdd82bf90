"""Volunteers get other blocks at a barrier, at a stored version, and only if the same ones are still here."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.effects import CollectCheckpoint, CoordinatorState, Record
from hetpeer.bootstrap.state.volunteer_state import LifeCycle
from tests.bootstrap.court import Court

WHOLE, FRONT, BACK = (0, 2), (0, 1), (1, 2)
HALVES = ((FRONT, BACK),)
DIVIDED = Arrangement(HALVES, {"a": (0, FRONT), "b": (0, BACK)})
ALONE = Arrangement(((WHOLE,),), {"a": (0, WHOLE)})


def both_alone() -> Court:
    """Two volunteers with both blocks each, in a step."""
    return Court().begin("a", "b")


def arrange(court: Court, arrangement: Arrangement):
    return court.do(court.core.arrange(arrangement, court.now))


def places(court: Court):
    return {v.peer: v.place for v in court.core.members.volunteers.values()}


def arranged(court: Court):
    return [record["layouts"] for record in court.records if record["kind"] == "arranged"]


def test_volunteers_are_moved_once_the_next_version_is_stored():
    court = both_alone()
    assert arrange(court, DIVIDED) == []
    effects = court.commit("a", "b")
    assert [x.version for x in effects if isinstance(x, CollectCheckpoint)] == [1]
    assert court.core.state is CoordinatorState.WAITING
    assert places(court) == {"a": WHOLE, "b": WHOLE}
    court.save()
    assert places(court) == {"a": FRONT, "b": BACK}
    assert arranged(court) == [[[[0, 1], [1, 2]]]]
    assert [(court.sent[p, "granted"].begin, court.sent[p, "granted"].end) for p in "ab"] == [FRONT, BACK]


def test_a_checkpoint_that_takes_too_long_holds_the_run_up_once():
    """However often something is proposed meanwhile, and afterwards."""
    court = Court(sync_s=10.0, steps=20).begin("a", "b")
    arrange(court, DIVIDED)
    waits = []
    for _ in range(4):
        court.commit("a", "b")
        began = court.now
        while court.core.state is CoordinatorState.WAITING:
            for peer in ("a", "b"):
                court.tell(peer, m.Heartbeat())
            court.tick(1.0)
            arrange(court, DIVIDED)
        waits.append(court.now - began)
    assert waits == pytest.approx([10.0, 0.0, 0.0, 0.0], abs=1.5)
    assert arranged(court) == []


def test_a_proposal_with_somebody_who_dies_is_void_also_where_the_run_goes_back():
    court = Court(layouts=(((0, 1), (1, 2)),), checkpoint_every=4).begin("a", "b")
    court.commit("a", "b")
    swapped = {
        peer: (0, FRONT if v.place == BACK else BACK) for peer, v in court.core.members.volunteers.items()
    }
    arrange(court, Arrangement(HALVES, swapped))
    court.tell("b", m.Farewell())
    assert [record["kind"] for record in court.records][-2:] == ["gone", "rollback"]
    assert arranged(court) == []


def test_they_go_on_when_they_have_the_state_of_their_new_blocks():
    court = both_alone()
    arrange(court, DIVIDED)
    court.commit("a", "b")
    court.save()
    for peer in ("a", "b"):
        court.tell(peer, m.Prepared())
    assert court.sent["a", "fetch"].sources == {0: ()}
    for peer in ("a", "b"):
        court.ready(peer)
    assert court.core.state is CoordinatorState.TRAINING
    assert court.sent["b", "begin"].roster == {"a": FRONT, "b": BACK}


def test_who_keeps_its_blocks_is_not_told_anything():
    court = both_alone()
    arrange(court, Arrangement((*HALVES, (WHOLE,)), {"a": (0, FRONT), "b": (1, WHOLE)}))
    court.commit("a", "b")
    del court.sent["b", "granted"]
    court.save()
    volunteer = court.core.members.volunteers["b"]
    assert (volunteer.cluster, volunteer.place, volunteer.life_cycle) == (1, WHOLE, LifeCycle.READY)
    assert ("b", "granted") not in court.sent
    assert court.core.state is CoordinatorState.TRAINING  # it holds all that is needed


def test_who_comes_and_goes_meanwhile_changes_nothing():
    """A stranger claims a place and leaves, again and again; another newcomer is given a place that fits."""
    court = both_alone()
    arrange(court, DIVIDED)
    court.prepare("c")
    for number in range(3):
        court.hello("stranger", incarnation=number)
        place = next(place for place in court.sent["stranger", "welcome"].places if place.open)
        court.tell("stranger", m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
        court.tell("stranger", m.Farewell())
    court.commit("a", "b")
    court.ready("c")
    court.save()
    assert len(arranged(court)) == 1
    assert places(court) == {"a": FRONT, "b": BACK, "c": WHOLE}
    assert court.core.members.volunteers["c"].cluster == 2


def test_a_newcomer_whose_place_is_taken_gets_another():
    court = both_alone()
    court.hello("c")
    c = next(place for place in court.sent["c", "welcome"].places if place.open)
    arrange(court, Arrangement(((WHOLE,), HALVES[0], HALVES[0]), {"a": (1, FRONT), "b": (2, FRONT)}))
    court.tell("c", m.Claim(cluster=c.cluster, begin=c.begin, end=c.end))
    court.commit("a", "b")
    court.save()
    (volunteer,) = [v for v in court.core.members.volunteers.values() if v.peer == "c"]
    assert volunteer.place in court.core.members.layout(volunteer.cluster)
    assert court.sent["c", "granted"].begin == volunteer.place[0]


def test_nothing_is_recorded_of_who_never_had_a_place():
    """A hundred strangers, ten sessions each."""
    court = both_alone()
    before = list(court.records)
    for number in range(1000):
        court.hello(f"stranger {number % 100}", incarnation=number)
    for number in range(50):
        court.tell(f"stranger {number}", m.Farewell())
    court.tick(60.0)
    assert not any("stranger" in str(record.get("peer")) for record in court.records[len(before) :])


@pytest.mark.parametrize("change", ["b goes", "the checkpoint fails", "the checkpoint takes too long"])
def test_a_proposal_is_void_when_things_are_not_as_they_were(change):
    court = both_alone()
    arrange(court, DIVIDED)
    match change:
        case "b goes":
            court.tick(1.0)
            court.do(court.core.broken("b", court.now))
            court.tick(3.0)
            court.commit("a")
        case "the checkpoint fails":
            court.commit("a", "b")
            court.do(court.core.not_saved(court.order, court.now))
            court.tick()
        case "the checkpoint takes too long":
            court.commit("a", "b")
            while court.core.state is CoordinatorState.WAITING:
                for peer in ("a", "b"):
                    court.tell(peer, m.Heartbeat())
                court.tick(5.0)
            assert court.now > 100.0 + court.core._context.config.sync_s
    assert court.core.state is CoordinatorState.TRAINING
    assert arranged(court) == []


def test_a_run_whose_stored_version_waits_for_a_holder_goes_on_with_those_who_are_left():
    court = Court(layouts=HALVES, checkpoint_every=1).begin("a", "b")
    court.do(court.core.broken("b", court.now))
    court.tick(3.0)
    assert court.core.members.uncovered() == [1]
    effects = arrange(court, ALONE)
    assert [x.record["kind"] for x in effects if isinstance(x, Record)] == ["rollback", "arranged"]
    assert places(court) == {"a": WHOLE}


def test_the_next_reign_knows_the_places():
    court = both_alone()
    arrange(court, DIVIDED)
    court.commit("a", "b")
    court.save()
    again = Court(court.records)
    assert again.core.members.layout(0) == HALVES[0]
    assert again.core.members.layout(1) == (WHOLE,)
    again.hello("a", place=FRONT)
    assert again.sent["a", "welcome"].member
    assert History.of(court.records).arranged == [[[0, 1], [1, 2]]]


@pytest.mark.parametrize(
    ("arrangement", "fault"),
    [
        (Arrangement(((FRONT,),), {}), "cluster 0 does not cut 2 blocks"),
        (Arrangement(((WHOLE, BACK),), {}), "cluster 0 does not cut 2 blocks"),
        (Arrangement(((FRONT, (1, 1), BACK),), {}), "cluster 0 does not cut 2 blocks"),
        (Arrangement(HALVES, {"a": (0, FRONT), "b": (0, FRONT)}), "two volunteers have one place"),
        (Arrangement(HALVES, {"a": (0, WHOLE)}), "a has a place that no cluster has"),
        (Arrangement(HALVES, {"a": (1, FRONT)}), "a has a place that no cluster has"),
    ],
)
def test_an_arrangement_that_is_none_is_refused(arrangement, fault):
    with pytest.raises(ValueError, match=fault):
        both_alone().core.arrange(arrangement, 100.0)


def test_nothing_is_moved_when_the_run_is_over():
    court = Court(steps=1, checkpoint_every=1).begin("a", "b")
    court.commit("a", "b")
    court.save()
    assert arrange(court, DIVIDED) == []
