"""Plans to be enacted: whom a seat is meant for, which plans fit, and what the log keeps of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hetpeer.bootstrap.log import plan_news
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.run.seat_plan import PlannedModel, PlannedSeat, SeatPlan
from hetpeer.dht.base.errors import ProtocolError, short_id

ADA = "Qm" + "a" * 38 + "x9fQ2a"


def plan(*pipelines, **facts):
    """A plan; each pipeline is a list of (device, begin, end)."""
    rows = [[PlannedSeat(device=d, blocks=(b, e)) for d, b, e in row] for row in pipelines]
    return SeatPlan(pipelines=rows, **facts)


HALVES = plan([("attic", 0, 2), ("shed", 2, 4)], step_s=4.0, model=PlannedModel(blocks=4, digest="ab"))


def planned(given=HALVES):
    """The record of a plan."""
    return {"kind": "planned", "id": given.id, "layouts": given.layouts, "plan": given.document()}


def committed(step, seconds):
    return {"kind": "commit", "step": step, "seconds": seconds}


@pytest.mark.parametrize(
    ("device", "peer", "is_hers"),
    [
        ("ada", "", True),
        (ADA, "", True),
        (f"ada{short_id(ADA)}", "", True),
        ("Ada", "", False),
        ("", ADA, False),
        ("bob", ADA, True),
        ("ada", "QmOther", False),
    ],
)
def test_a_seat_is_meant_for_a_name_or_for_one_peer(device, peer, is_hers):
    if not device:
        with pytest.raises(ValidationError):
            PlannedSeat(device=device, peer=peer, blocks=(0, 1))
        return
    assert PlannedSeat(device=device, peer=peer, blocks=(0, 1)).is_of(ADA, "ada") is is_hers


def test_names_are_compared_as_adverts_have_them():
    """Adverts carry 32 characters of printable ASCII, so a file may have more."""
    assert PlannedSeat(device="Büro <1>" + "x" * 40, blocks=(0, 1)).is_of(ADA, "Büro <1>" + "x" * 40)


@pytest.mark.parametrize(
    ("given", "blocks", "fault"),
    [
        (HALVES, 4, None),
        (HALVES, 5, "pipeline 0 ends before block 4, and the model has 5 blocks"),
        (plan([("a", 0, 2), ("b", 3, 4)]), 4, "pipeline 0: b has the blocks [3, 4), and block 2 comes next"),
        (
            plan([("a", 0, 4)], [("b", 1, 4)]),
            4,
            "pipeline 1: b has the blocks [1, 4), and block 0 comes next",
        ),
        (plan([("a", 0, 0), ("b", 0, 4)]), 4, "pipeline 0: a has the blocks [0, 0), and block 0 comes next"),
        (plan([("a", 0, 2), ("a", 2, 4)]), 4, "a has 2 places"),
        (plan([("a", 0, 4)], [("b", 0, 4)]), 4, None),
    ],
)
def test_cuts_cover_the_model_once_in_each_pipeline(given, blocks, fault):
    assert given.fault(blocks) == fault


@given(
    st.lists(
        st.lists(st.tuples(st.text(min_size=1, max_size=8), st.integers(1, 5)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_documents_are_read_back_as_they_were(rows):
    """Whatever a file calls its devices."""
    given = []
    for row in rows:
        at, seats = 0, []
        for name, size in row:
            seats.append({"device": name, "blocks": [at, at + size]})
            at += size
        given.append(seats)
    try:
        found = SeatPlan.model_validate({"pipelines": given})
    except ValidationError:  # a name without any character that adverts carry
        return
    again = SeatPlan.model_validate(found.document())
    assert (again, again.id) == (found, found.id)


def test_the_log_says_which_plan_holds_and_since_when():
    history = History.of([committed(0, 9.0), planned()])
    assert history.arranged == list(HALVES.layouts)
    assert (history.plan["id"], history.plan_since, history.plan_ended) == (HALVES.id, 1, None)
    history.add({"kind": "arranged", "layouts": [], "plan": HALVES.id})
    history.add(committed(1, 9.0))
    assert (history.plan_since, history.plan_ended) == (1, None)
    history.add({"kind": "arranged", "layouts": []})
    assert history.plan_ended == 2
    history.add(planned(plan([("b", 0, 4)])))
    assert (history.plan_since, history.plan_ended) == (2, None)


def test_a_plan_keeps_the_cuts_of_those_that_are_there():
    """They are adopted with what they hold, and nothing is lost."""
    before = [[[0, 1], [1, 4]]]
    history = History.of([{"kind": "arranged", "layouts": before}, planned()])
    assert history.arranged == [*HALVES.layouts, *before]


def test_news_of_a_plan():
    records = [planned(), *(committed(step, 5.0 + step) for step in range(4))]
    news = plan_news.decode(plan_news.encode(History.of(records)), "ada")
    assert (news.plan, news.since, news.ended) == (HALVES, 0, None)
    assert news.measured_s == 7.0
    assert plan_news.decode(plan_news.encode(History()), "ada") is None


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x81\xa2id\xa2ab", b"\x93\x01\x02\x03"])
def test_what_is_no_news_is_refused(data):
    with pytest.raises(ProtocolError):
        plan_news.decode(data, "mallory")
