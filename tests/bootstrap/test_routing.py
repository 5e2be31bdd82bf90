"""The ways of a step's ids as peers come and go."""

from hetpeer.bootstrap.routing import Assignments
from hetpeer.stages.execution.routes import Hop

BLOCKS = 4
IDS = range(12)


def assignments(roster: dict[str, tuple[int, int]]) -> Assignments:
    """Of a step of which nothing is done yet."""
    return Assignments(IDS, roster, BLOCKS, {}, lambda: set(IDS), lambda _block, _id: None)


def test_a_newcomer_gets_its_part_and_who_begins_is_told() -> None:
    roster = {"a": (0, 2), "b": (2, 4)}
    ways = assignments(roster)
    roster["c"] = (2, 4)
    told = ways.share("c", 1.0)
    assert told.keys() == {"a"}
    assert {task.route for task in told["a"]} == {(Hop("a", 0, 2), Hop("c", 2, 4))}
    assert len(told["a"]) == len(IDS) // 2


def test_what_nobody_can_begin_is_told_to_nobody_until_somebody_can() -> None:
    """Who began it is back at a shorter place, and nobody holds what it does not hold any more."""
    roster = {"a": (0, 2), "b": (2, 4)}
    ways = assignments(roster)
    roster["a"] = (0, 1)
    roster["c"] = (2, 4)
    assert ways.share("c", 1.0) == {}
    assert ways.without_beginning() == set(IDS)
    assert ways.again(IDS) == {}
    roster["d"] = (1, 2)
    assert ways.again(IDS) == {"a": set(IDS)}
    assert {task.route[:2] for task in ways.tasks("a")} == {(Hop("a", 0, 1), Hop("d", 1, 2))}


def test_who_is_back_keeps_what_was_to_pass_it() -> None:
    """Its ids are its part already: nothing is taken from anybody, least of all from itself."""
    roster = {"a": (0, 2), "b": (2, 4), "c": (2, 4)}
    ways = assignments(roster)
    assert ways.share("b", 1.0) == {}
