"""Volunteers in a forming cluster get a cut of their own (docs/averaging.md, "A cut for waiting
volunteers").
"""

import pytest

from hetpeer.averaging import messages as m
from tests.bootstrap.clustered import FIRST, LAST, WHOLE, Waiting
from tests.bootstrap.court import BLOCKS


def test_who_has_room_for_all_of_the_model_waits_for_nobody():
    one = Waiting().comes("a")
    assert one.core.forming is not None
    assert one.founded == []
    one.recut(("a", WHOLE))
    assert (one.sent["a", "granted"].begin, one.sent["a", "granted"].end) == WHOLE
    assert one.core.forming is None
    assert one.founded == [], "not before it is prepared for its new place"
    one.tell("a", m.Prepared())
    assert one.founded == [{"kind": "founded", "cluster": 0, "version": 0, "layout": [[*WHOLE]]}]


def test_a_successor_knows_the_cut():
    one = Waiting().comes("a")
    one.recut(("a", WHOLE))
    one.tell("a", m.Prepared())
    after = Waiting(one.records)
    held = tuple(m.Held(block=b, version=0, digest="state") for b in range(BLOCKS))
    after.tell("a", m.Hello(run="run", incarnation=1, cluster=0, place=WHOLE, held=held))
    assert after.sent["a", "welcome"].member
    assert after.core.forming is None


def test_the_usual_cut_is_not_written_down():
    assert Waiting().comes("a", "b").founded == [{"kind": "founded", "cluster": 0, "version": 0}]


def test_whom_the_cut_spares_looks_for_another_place():
    one = Waiting(layout=(FIRST, LAST, (2, 3))).comes("a", "b")
    one.recut(("a", (0, 3)), spared=("b",))
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
    one.recut(("a", WHOLE))
    assert one.sent == before


@pytest.mark.parametrize(
    ("seats", "spared"),
    [
        ((), ()),
        ((("a", FIRST),), ()),
        ((("a", LAST),), ()),
        ((("a", FIRST), ("b", FIRST)), ()),
        ((("a", FIRST), ("a", LAST)), ()),
        ((("a", (0, 0)), ("b", WHOLE)), ()),
        ((("a", WHOLE),), ("a",)),
    ],
)
def test_a_cut_that_is_none_is_refused(seats, spared):
    one = Waiting().comes("a")
    with pytest.raises(ValueError, match=r"cut into|two places"):
        one.recut(*seats, spared=spared)
