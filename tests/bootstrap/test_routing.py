"""Routes of a step's ids as peers come and go."""

import time
from collections import Counter

import pytest

from hetpeer.averaging.messages import Task
from hetpeer.bootstrap.coordinator.routing import Assignments
from hetpeer.bootstrap.state.membership import BlockDemand, Membership
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState
from hetpeer.bootstrap.state.work_shares import LinkCosts, link_costs, rates
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from hetpeer.stages.pipeline.routes import Hop, Route, assign_routes

BLOCKS = 4
IDS = range(12)


def assignments(roster: dict[str, tuple[int, int]]) -> Assignments:
    """Assignments of a step of which nothing is done yet."""
    return Assignments(IDS, roster, BLOCKS, {}, lambda: set(IDS), lambda _block, _id: None)


def handed(told: dict[str, tuple[Task, ...]]) -> dict[str, set[int]]:
    return {first: {task.id for task in tasks} for first, tasks in told.items()}


def combinations_of_lazy() -> list[frozenset[str]]:
    """One holder of each of the blocks 1, 2 and 3."""
    return [frozenset((f"1{a}", f"2{b}", f"3{c}")) for a in "abc" for b in "abc" for c in "abc"]


def test_a_newcomer_gets_its_part_and_who_begins_is_told() -> None:
    roster = {"a": (0, 2), "b": (2, 4)}
    ways = assignments(roster)
    roster["c"] = (2, 4)
    told = ways.share("c", 1.0)
    assert told.keys() == {"a"}
    assert {task.route for task in told["a"]} == {(Hop("a", 0, 2), Hop("c", 2, 4))}
    assert len(told["a"]) == len(IDS) // 2


def test_what_nobody_can_begin_is_told_to_nobody_until_somebody_can() -> None:
    """Its first hop is back at a shorter place, and nobody holds the rest."""
    roster = {"a": (0, 2), "b": (2, 4)}
    ways = assignments(roster)
    roster["a"] = (0, 1)
    roster["c"] = (2, 4)
    assert ways.share("c", 1.0) == {}
    assert ways.without_beginning() == set(IDS)
    assert ways.again(IDS) == {}
    roster["d"] = (1, 2)
    assert handed(ways.again(IDS)) == {"a": set(IDS)}
    assert {task.route[:2] for task in ways.tasks()["a"]} == {(Hop("a", 0, 1), Hop("d", 1, 2))}


def test_who_is_back_keeps_what_was_to_pass_it() -> None:
    """Its ids are its share already: nothing is taken from anybody, least of all from itself."""
    roster = {"a": (0, 2), "b": (2, 4), "c": (2, 4)}
    ways = assignments(roster)
    assert ways.share("b", 1.0) == {}


def routed(lines: LinkCosts, speeds: dict[str, float] | None = None) -> Counter[tuple[str, ...]]:
    """How many of twelve ids take each route through two clusters of two stages."""
    roster = {"a1": (0, 2), "a2": (2, 4), "b1": (0, 2), "b2": (2, 4)}
    routes = assign_routes(IDS, roster, BLOCKS, speeds or {}, lines)
    return Counter(tuple(hop.peer for hop in route) for route in routes.values())


CROSSED = {"a1": 0, "b2": 0, "b1": 1, "a2": 1}
"""Clusters that are not in the order of names."""


def test_ids_stay_in_their_cluster_where_all_else_is_equal() -> None:
    assert routed(LinkCosts()) == {("a1", "a2"): 6, ("b1", "b2"): 6}
    assert routed(LinkCosts(CROSSED)) == {("a1", "b2"): 6, ("b1", "a2"): 6}


def test_the_load_counts_for_more_than_the_cluster() -> None:
    """Another half of each cluster is slow: the fast halves work together."""
    ways = routed(LinkCosts(CROSSED), {"a1": 4.0, "a2": 4.0, "b1": 1.0, "b2": 1.0})
    assert ways["a1", "a2"] >= 8


def test_slow_lines_are_avoided_where_faster_ones_are_known() -> None:
    slow = {("a1", "a2"): 40.0, ("b1", "b2"): 40.0}
    fast = {("a1", "b2"): 1.0, ("b1", "a2"): 1.0}
    ways = routed(LinkCosts({"a1": 0, "a2": 0, "b1": 1, "b2": 1}, slow | fast))
    assert ways["a1", "b2"] + ways["b1", "a2"] >= 10


def test_a_line_that_was_never_used_is_not_taken_to_be_faster_than_the_known_ones() -> None:
    slow = {("a1", "a2"): 40.0, ("b1", "b2"): 40.0}
    assert routed(LinkCosts({"a1": 0, "a2": 0, "b1": 1, "b2": 1}, slow)) == {("a1", "a2"): 6, ("b1", "b2"): 6}


def test_a_coordinator_knows_lines_from_what_volunteers_say() -> None:
    """In block times of the fastest peer, forward and back together."""
    members = Membership(
        [[(0, 2), (2, 4)]], [BlockDemand(elements=1, memory=PlaceDemand(activations=1), flops=1.0)] * BLOCKS
    )
    said = {"a": ((0, 2), 2.0, 0.2, {"b": 1.0, "gone": 9.0}), "b": ((2, 4), 1.0, 0.4, {"a": 0.5})}
    for peer, (place, speed, computing, links) in said.items():
        members.volunteers[peer] = VolunteerState(
            peer,
            1,
            0.0,
            speed,
            life_cycle=LifeCycle.READY,
            cluster=0,
            place=place,
            computing=computing,
            links=links,
        )
    lines = link_costs(members.ready(), rates(members.ready(), members.costs))
    assert lines("a", "b") == lines("b", "a") == 15.0
    assert lines("a", "gone") > 0.0


def test_neither_a_small_block_nor_a_liar_makes_lines_dear() -> None:
    """An embedding takes a hundredth of a median block, and one volunteer claims to compute in no time.

    Neither makes links expensive.
    """
    costs = [
        BlockDemand(elements=1, memory=PlaceDemand(activations=1), flops=flops)
        for flops in (0.04, 2.0, 1.0, 0.96)
    ]
    members = Membership([[(0, 1), (1, 2), (2, 3), (3, 4)]], costs)
    for number, (peer, computing) in enumerate((("a", 0.004), ("b", 0.2), ("c", 1e-9), ("d", 0.096))):
        members.volunteers[peer] = VolunteerState(
            peer,
            1,
            0.0,
            1.0,
            life_cycle=LifeCycle.READY,
            place=(number, number + 1),
            computing=computing,
            links={"b": 0.1},
        )
    speeds = rates(members.ready(), members.costs)
    block_of_middle_size = max(speeds.values()) / speeds["d"]
    assert link_costs(members.ready(), speeds)("a", "b") == pytest.approx(block_of_middle_size * 0.1 / 0.096)


def passing(ways: Assignments, *pair: str) -> int:
    """Ids that go from one of these to the other."""
    tasks = [task for first in ways.tasks().values() for task in first]
    return sum(tuple(hop.peer for hop in task.route) == pair for task in tasks)


def kept_apart(*pairs: str, roster: dict[str, tuple[int, int]]) -> Assignments:
    apart = {frozenset(pair) for pair in pairs}
    return Assignments(IDS, roster, BLOCKS, {}, lambda: set(IDS), lambda _block, _id: None, apart=apart)


FOUR = {"a": (0, 2), "b": (0, 2), "y": (2, 4), "z": (2, 4)}


def test_nothing_passes_between_two_that_are_kept_apart() -> None:
    ways = kept_apart("ay", roster=FOUR)
    assert passing(ways, "a", "y") == 0
    assert sum(passing(ways, first, last) for first in "ab" for last in "yz") == len(IDS)
    assert passing(ways, "b", "y") > 0


def test_who_is_apart_from_all_others_gets_nothing_if_somebody_else_can_do_it() -> None:
    ways = kept_apart("ay", "az", roster=FOUR)
    assert "a" not in ways.tasks()
    alone = kept_apart("ay", "az", roster={"a": (0, 2), "y": (2, 4), "z": (2, 4)})
    assert len(alone.tasks()["a"]) == len(IDS)


def test_they_stay_apart_when_others_come_and_go() -> None:
    roster = {"a": (0, 2), "y": (2, 4)}
    ways = kept_apart("ax", "xy", roster=roster)
    roster["x"] = (0, 2)
    assert ways.share("x", 1.0) == {}
    roster["z"] = (2, 4)
    del roster["a"]
    assert handed(ways.again(IDS)) == {"x": set(IDS)}
    assert passing(ways, "x", "z") == len(IDS)


def test_however_many_pairs_are_named_routes_are_found_at_once_and_avoid_what_they_can() -> None:
    """Four peers have one stage and twelve the next: nobody can make the search for routes long."""
    roster = {f"a{n}": (0, 2) for n in range(5)} | {f"y{n}": (2, 4) for n in range(13)}
    pairs = {frozenset((f"a{n}", f"y{k}")) for n in range(4) for k in range(12)}
    ids = range(48)
    began = time.monotonic()
    routes = assign_routes(ids, roster, BLOCKS, {}, apart=pairs)
    ways = Assignments(ids, roster, BLOCKS, {}, lambda: set(ids), lambda _block, _id: None, apart=pairs)
    for n in range(4):
        ways.part(f"a{n}", "y12")
    assert time.monotonic() - began < 5.0
    assert not any(frozenset((one.peer, other.peer)) in pairs for one, other in routes.values())
    tasks = [task for first in ways.tasks().values() for task in first]
    assert {task.route[0].peer for task in tasks} == {"a4"}


def test_where_two_who_are_apart_have_to_work_together_the_others_are_kept_apart_all_the_same() -> None:
    roster = {"a": (0, 1), "b": (1, 2), "c": (1, 2), "d": (2, 4)}
    ways = kept_apart("bd", "cd", "ac", roster=roster)
    assert passing(ways, "a", "b", "d") == len(IDS)


@pytest.mark.parametrize("lazy", combinations_of_lazy())
def test_ids_get_past_those_that_sit_on_them_wherever_these_are(lazy: frozenset[str]) -> None:
    """One of three holders does nothing at each of three blocks. Detours that went round the holders of all
    blocks in step would meet one of the three each time, for ever.
    """
    roster = {f"{block}{holder}": (block, block + 1) for block in range(4) for holder in "abc"}
    counted: dict[int, Route] = {}

    def holder(block: int, microbatch: int) -> str | None:
        return counted[microbatch][block].peer if microbatch in counted else None

    def undone() -> set[int]:
        return set(range(24)) - counted.keys()

    ways = Assignments(range(24), roster, 4, dict.fromkeys(roster, 1.0), undone, holder)
    for _ in range(10):
        for microbatch in undone():
            if not lazy & {hop.peer for hop in ways.route_taken(microbatch)}:
                counted[microbatch] = ways.route_taken(microbatch)
        left = undone()
        ways.stuck(left)
        ways.again(left)
    assert not undone()
