"""The plan beside what came of it, in `hetpeer status`."""

import dataclasses

import pytest

from hetpeer.bootstrap.log.plan_news import PlanNews
from hetpeer.peer.cli.swarm.plan_text import plan_text, seat_cells
from hetpeer.peer.reliable.plan_watch import PlanWatch
from hetpeer.peer.watching.plan_status import plan_status
from hetpeer.peer.watching.swarm_status import PeerRow
from tests.bootstrap.test_seat_plan import plan

GIVEN = plan([("attic", 0, 2), ("shed", 2, 4)], [("loft", 0, 4)], step_s=4.0)
NEWS = PlanNews(id="abc", plan=GIVEN, since=3, measured_s=4.4)


def row(peer, name, blocks, role="volunteer"):
    """A peer of which nothing else is known."""
    empty = {"tuple": (), "int": 0, "float": 0.0, "str": "", "bool": False}
    fields = {
        field.name: empty[str(field.type).partition("[")[0].partition(" ")[0]]
        for field in dataclasses.fields(PeerRow)
    }
    return PeerRow(**fields | {"peer": peer, "name": name, "blocks": blocks, "role": role})


def test_who_is_where_beside_the_plan():
    rows = [
        row("Qm1", "attic", (0, 2)),
        row("Qm2", "shed", (0, 4)),
        row("Qm3", "loft", None),
        row("Qm4", "loft", (0, 4), role="coordinator"),
    ]
    found = plan_status(NEWS, rows)
    assert [(seat.device, seat.peer, seat.standing) for seat in found.seats] == [
        ("attic", "Qm1", "as planned"),
        ("shed", "Qm2", "elsewhere"),
        ("loft", "Qm3", "joining"),
    ]
    assert list(seat_cells(found))[1] == ("shed", "pipeline 0, blocks 2-3", "has blocks 0-3")
    assert [seat.standing for seat in plan_status(NEWS, []).seats] == ["not there"] * 3


def test_of_two_with_one_name_the_one_at_the_place_counts():
    rows = [row("Qm1", "attic", (2, 4)), row("Qm2", "attic", (0, 2)), row("Qm3", "attic", None)]
    assert plan_status(NEWS, rows).seats[0].peer == "Qm2"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "abc since step 3, 0 of 3 at their places: 4.00 s a step planned, 4.40 s measured (+10%)"),
        ({"measured_s": None}, "abc since step 3, 0 of 3 at their places: 4.00 s a step planned"),
        ({"measured_s": 40.0}, "4.00 s a step planned, 40.00 s measured (10 times)"),
        ({"ended": 9}, "abc not in force since step 9, 0 of 3 at their places"),
        ({"plan": GIVEN.model_copy(update={"cost": "dt-fm"})}, "a step planned (communication only), 4.40 s"),
        ({"plan": GIVEN.model_copy(update={"step_s": None})}, "their places: 4.40 s measured"),
    ],
)
def test_planned_and_measured_step_side_by_side(changes, text):
    assert text in plan_text(plan_status(NEWS.model_copy(update=changes), []))


def test_each_remark_is_told_once_and_again_if_it_was_false_in_between():
    watch = PlanWatch(lambda: None)
    assert watch.news(["a", "b", "a"]) == ["a", "b"]
    assert watch.news(["b", "a"]) == []
    assert watch.news(["b"]) == []
    assert watch.news(["b", "a"]) == ["a"]
