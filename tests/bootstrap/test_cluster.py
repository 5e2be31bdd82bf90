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
    one.passes(9.0, "a", "b", "c")
    assert one.founded == [], "somebody has just come"
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
    assert 28.0 <= one.now <= 34.0
    assert one.founded


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
