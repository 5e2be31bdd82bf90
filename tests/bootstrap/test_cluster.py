"""Volunteers that wait are divided into clusters (docs/grouped.md, "Formation of clusters")."""

import pytest

from hetpeer.averaging import messages as m
from tests.bootstrap.clustered import FIRST, LAST, WHOLE, Waiting
from tests.bootstrap.court import BLOCKS


def test_who_has_room_for_all_of_the_model_waits_for_nobody():
    one = Waiting().comes("a")
    assert one.core.waiting == {"a": (0, FIRST)}
    assert one.founded == []
    one.form([("a", WHOLE)])
    assert (one.sent["a", "granted"].begin, one.sent["a", "granted"].end) == WHOLE
    assert one.founded == [], "not before it is prepared for its new place"
    one.tell("a", m.Prepared())
    assert one.founded == [{"kind": "founded", "cluster": 0, "version": 0, "layout": [[*WHOLE]]}]


def test_a_successor_knows_the_cut():
    one = Waiting().comes("a")
    one.form([("a", WHOLE)])
    one.tell("a", m.Prepared())
    after = Waiting(one.records)
    held = tuple(m.Held(block=b, version=0, digest="state") for b in range(BLOCKS))
    after.tell("a", m.Hello(run="run", incarnation=1, cluster=0, place=WHOLE, held=held))
    assert after.sent["a", "welcome"].member
    assert after.core.waiting == {}


def test_the_usual_cut_is_not_written_down():
    assert Waiting().comes("a", "b").founded == [{"kind": "founded", "cluster": 0, "version": 0}]


def test_whom_the_cut_spares_looks_for_another_place():
    one = Waiting(layout=(FIRST, LAST, (2, 3))).comes("a", "b")
    one.form([("a", (0, 3))], spared=("b",))
    assert {place.cluster for place in one.sent["b", "welcome"].places if place.open} == {1}
    one.comes("b")
    assert one.sent["b", "granted"].line.cluster == 1


@pytest.mark.parametrize("late", ["comes", "leaves"])
def test_nothing_happens_if_others_are_there_by_now(late):
    one = Waiting().comes("a")
    if late == "leaves":
        one.tell("a", m.Farewell())
    else:
        one.comes("b")
    before = dict(one.sent)
    one.form([("a", WHOLE)])
    assert one.sent == before


@pytest.mark.parametrize(
    ("clusters", "spared"),
    [
        ((), ("a",)),
        (((),), ()),
        (((("a", FIRST),),), ()),
        (((("a", LAST),),), ()),
        (((("a", FIRST), ("b", FIRST)),), ()),
        (((("a", FIRST), ("a", LAST)),), ()),
        (((("a", (0, 0)), ("b", WHOLE)),), ()),
        (((("a", WHOLE),),), ("a",)),
        (((("a", WHOLE),), (("a", WHOLE),)), ()),
    ],
)
def test_clusters_that_are_none_are_refused(clusters, spared):
    one = Waiting().comes("a")
    with pytest.raises(ValueError, match=r"cut into|two places|nobody"):
        one.form(*clusters, spared=spared)


def test_the_first_clusters_wait_until_all_that_come_are_divided():
    """Four arrive; places by arrival would be a with b and c with d."""
    one = Waiting(gather_s=10.0).comes("a", "b", "c", "d")
    assert one.core.gathers
    assert set(one.core.waiting) == {"a", "b", "c", "d"}
    one.passes(5.0, *"abcd")
    assert one.founded == []
    one.form([("a", FIRST), ("c", LAST)], [("d", WHOLE)], spared=("b",))
    assert not one.core.gathers
    assert one.core.clusters.of("b") is None
    one.tell("c", m.Prepared())
    assert [record["cluster"] for record in one.founded] == [0], "a is where it was: it prepares nothing anew"
    one.tell("d", m.Prepared())
    assert one.founded[1] == {"kind": "founded", "cluster": 1, "version": 0, "layout": [[*WHOLE]]}
    assert one.sent["c", "granted"].line.cluster == 0
    assert {place.cluster for place in one.sent["b", "welcome"].places if place.open} == {2}


def test_without_a_planner_they_are_founded_as_they_came():
    one = Waiting(gather_s=10.0).comes("a", "b")
    one.passes(9.0, "a", "b")
    one.comes("c")
    one.passes(17.0, "a", "b", "c")
    assert one.founded == [], "somebody has just come, nine seconds after the others"
    one.passes(2.0, "a", "b", "c")
    assert one.founded == [{"kind": "founded", "cluster": 0, "version": 0}]
    one.comes("d")
    assert [record["cluster"] for record in one.founded] == [0, 1], "once a cluster lives nobody gathers"


def test_newcomers_hold_nobody_up_for_ever():
    one = Waiting(gather_s=10.0).comes("a", "b")
    for number in range(10):
        one.passes(4.0, *(["a", "b", *(f"late {n}" for n in range(number))]))
        if one.founded:
            break
        one.hello(f"late {number}")
        one.claims(f"late {number}")
    assert 38.0 <= one.now <= 44.0
    assert one.founded


def divides(one, *peers):
    """Let a planner give each of `peers`, all that wait, a cluster of its own, and all be prepared."""
    one.form(*([(peer, WHOLE)] for peer in peers))
    for peer in peers:
        one.tell(peer, m.Prepared())


@pytest.mark.parametrize("gap_s", [10.0, 12.0, 15.0])
def test_who_comes_at_intervals_is_divided_with_the_others(gap_s):
    """Two that have come are a hint at the third: the first eight are in one division."""
    one, here = Waiting(gather_s=10.0), ["a"]
    one.comes("a")
    one.core.expect(["b"])  # or the first would not wait for the second
    divides(one, "a")
    for late in "bcdefgh":
        one.passes(gap_s, *here)
        assert one.founded == [], f"{len(here)} wait for {late}"
        one.comes(late)
        here.append(late)
        one.core.expect([])
        divides(one, *here)
    one.passes(2 * gap_s + 1, *here)
    assert len(one.founded) == 8


def test_who_is_alone_waits_for_nobody():
    one = Waiting(gather_s=10.0).comes("a")
    divides(one, "a")
    assert len(one.founded) == 1


def test_who_is_alone_again_waits_for_nobody():
    one = Waiting(gather_s=10.0).comes("a")
    one.passes(5.0, "a")
    one.comes("b")
    one.form([("a", WHOLE)], [("b", WHOLE)])
    one.tell("b", m.Farewell())
    one.tell("a", m.Prepared())
    assert len(one.founded) == 1


@pytest.mark.parametrize(("gap_s", "waits_s"), [(4.0, 8.0), (12.0, 24.0), (20.0, 30.0), (31.0, 0.0)])
def test_the_next_one_is_waited_for_twice_as_long_as_the_last_were_apart(gap_s, waits_s):
    """Up to half a minute; who comes more rarely than that is not waited for."""
    one = Waiting(gather_s=10.0).comes("a")
    one.passes(gap_s, "a")
    one.comes("b")
    one.form([("a", WHOLE)], [("b", WHOLE)])
    came = one.now
    while not one.founded and one.now < came + 100:
        one.tell("a", m.Prepared())
        one.tell("b", m.Prepared())
        one.passes(1.0, "a", "b")
    assert waits_s <= one.now - came <= waits_s + 2.0


def test_who_comes_back_is_no_arrival():
    """One that restarts again and again does not hold the others up."""
    one = Waiting(gather_s=10.0).comes("a", "b")
    for _ in range(3):
        one.passes(3.0, "a", "b")
        one.tell("b", m.Farewell())
        one.comes("b")
    one.form([("a", WHOLE)], [("b", WHOLE)])
    one.tell("a", m.Prepared())
    assert len(one.founded) == 1


def test_who_is_on_the_way_is_waited_for_but_not_for_ever():
    one = Waiting(gather_s=10.0).comes("a")
    one.core.expect(["a", "b"])
    divides(one, "a")
    one.passes(20.0, "a")
    assert one.founded == [], "b is on the way"
    one.comes("b")
    divides(one, "a", "b")
    one.passes(20.0, "a", "b")
    assert one.founded == [], "after such a gap another one may come"
    two = Waiting(gather_s=10.0).comes("a")
    two.core.expect(["never"])
    divides(two, "a")
    came = two.now
    while not two.founded and two.now < came + 100.0:
        two.passes(1.0, "a")
    assert two.now - came == pytest.approx(40.0, abs=2.0)


def test_nobody_is_on_the_way_any_more_once_it_has_left():
    one = Waiting(gather_s=10.0).comes("a")
    one.core.expect(["b"])
    divides(one, "a")
    one.core.expect([])
    one.passes(1.0, "a")
    assert len(one.founded) == 1


def test_who_comes_after_the_division_is_in_the_next_one():
    one = Waiting(gather_s=10.0).comes("a", "b", "c")
    one.form([("a", WHOLE)], [("b", WHOLE)], [("c", WHOLE)])
    one.comes("d")
    one.tell("a", m.Prepared())
    assert one.founded == [], "d waits too"
    assert one.core.gathers
    one.form([("a", WHOLE)], [("b", WHOLE)], [("c", FIRST), ("d", LAST)])
    assert [record["cluster"] for record in one.founded] == [0], "a kept its place, and is prepared"


def test_spared_volunteers_hold_nobody_up():
    one = Waiting(gather_s=10.0).comes("a", "b")
    one.form([("a", WHOLE)], spared=("b",))
    one.comes("b")
    assert not one.core.gathers
    one.tell("a", m.Prepared())
    assert [record["cluster"] for record in one.founded] == [0]


def test_after_all_have_fallen_apart_those_that_are_left_gather_again():
    one = Waiting(gather_s=10.0).comes("a", "b")
    one.passes(11.0, "a", "b")
    one.fetched(0, a=FIRST, b=LAST)
    one.passes(100.0, "a", "b")
    one.tell("b", m.Farewell())
    one.passes(12.0, "a")
    assert one.of("dissolved")
    one.comes("c")
    one.again("a")
    one.passes(9.0, "a", "c")
    assert len(one.founded) == 1
    one.passes(2.0, "a", "c")
    assert len(one.founded) == 2


def test_with_an_older_volunteer_they_are_founded_as_they_came():
    one = Waiting(gather_s=10.0).comes("a", "b")
    one.hello("old", wire_version=4)
    one.claims("old")
    assert one.core.waiting == {}
    one.form([("a", WHOLE)], [("b", WHOLE)], [("old", WHOLE)])
    one.passes(11.0, "a", "b", "old")
    assert one.founded == [{"kind": "founded", "cluster": 0, "version": 0}]


def test_only_open_clusters_are_divided_anew_while_others_live():
    one = Waiting().comes("a", "b", "c")
    assert [record["cluster"] for record in one.founded] == [0]
    assert set(one.core.waiting) == {"c"}
    assert not one.core.gathers
