"""Speeds and link costs of volunteers, and limits of those that do not do their ids."""

from collections import Counter
from itertools import pairwise

import pytest

from hetpeer.bootstrap.coordinator.routing import Assignments
from hetpeer.bootstrap.state.link_targets import link_targets
from hetpeer.bootstrap.state.membership import BlockDemand, Membership
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState
from hetpeer.bootstrap.state.work_shares import (
    FORGIVEN,
    LEAST,
    MAX_PEERS,
    MOST,
    IssueLimits,
    few,
    link_costs,
    rates,
)
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from hetpeer.stages.pipeline.routes import assign_routes
from hetpeer.stages.planning.swarms.plan_inputs import Compression

MICROBATCHES = range(24)
ADAPTIVE = Compression(forward=100.0, backward=100.0, adaptive=True)
INT8 = Compression(forward=3.97, backward=3.97)


def swarm(places: dict[str, tuple[int, tuple[int, int]]], flops: tuple[float, ...]) -> Membership:
    """Volunteers of 1 FLOP/s each: name → cluster and blocks."""
    costs = [BlockDemand(elements=1, memory=PlaceDemand(activations=1), flops=one) for one in flops]
    members = Membership([[(0, len(flops))]], costs)
    for name, (cluster, place) in places.items():
        members.volunteers[name] = VolunteerState(
            name, 1, 0.0, 1.0, life_cycle=LifeCycle.READY, cluster=cluster, place=place
        )
    return members


def speeds(members: Membership) -> dict[str, float]:
    return rates(members.ready(), members.costs)


def routed(members: Membership) -> Counter[tuple[str, ...]]:
    links = link_costs(members.ready(), speeds(members))
    routes = assign_routes(MICROBATCHES, members.roster(), members.blocks, speeds(members), links)
    return Counter(tuple(hop.peer for hop in route) for route in routes.values())


def test_whose_blocks_are_heavier_does_fewer_of_them() -> None:
    """The head of a model is one block and takes as long as four others."""
    members = swarm(
        {"whole": (0, (0, 5)), "front": (1, (0, 4)), "head": (1, (4, 5))}, (1.0, 1.0, 1.0, 1.0, 4.0)
    )
    rate = speeds(members)
    assert rate["front"] / rate["head"] == pytest.approx(4.0)
    assert rate["whole"] == pytest.approx(1.0 / 1.6)
    ways = routed(members)
    assert ways["front", "head"] == pytest.approx(2 * ways["whole",], abs=2)


def test_what_training_took_counts_for_more_than_what_was_tried_before() -> None:
    """Both rehearsed alike, but one is limited to a third of its processor."""
    members = swarm({"free": (0, (0, 2)), "held": (1, (0, 2))}, (1.0, 1.0))
    assert routed(members) == {("free",): 12, ("held",): 12}
    for name, seconds in (("free", 0.1), ("held", 0.3)):
        members.volunteers[name].computing = seconds
    assert routed(members) == {("free",): 18, ("held",): 6}


def test_who_has_not_trained_is_as_much_slower_than_it_was_before_as_the_others() -> None:
    members = swarm({name: (n, (0, 2)) for n, name in enumerate("abc")}, (2.0, 2.0))
    members.volunteers["a"].computing = members.volunteers["b"].computing = 8.0
    members.volunteers["c"].flops_per_second = 3.0
    assert speeds(members) == pytest.approx({"a": 0.25, "b": 0.25, "c": 0.75})


@pytest.mark.parametrize(
    ("compression", "least", "most"), [(Compression(), 0, 2), (INT8, 2, 4), (ADAPTIVE, 6, 12)]
)
def test_a_slow_line_that_may_compress_is_no_reason_to_leave_its_ends_idle(
    compression: Compression, least: int, most: int
) -> None:
    """Two pipelines of equal speed.

    Uncompressed, a bundle takes ten times as long as the work on one's link, a tenth on the other's.
    """
    members = swarm({f"{c}{s}": (n, (s, s + 1)) for n, c in enumerate("ab") for s in range(2)}, (1.0, 1.0))
    for name, volunteer in members.volunteers.items():
        volunteer.computing = 0.3
        volunteer.links = {f"{name[0]}{1 - int(name[1])}": 3.0 if name[0] == "a" else 0.03}
    ready = members.ready()
    lines = link_costs(ready, speeds(members), compression, link_targets(ready, compression.forward))
    routes = assign_routes(MICROBATCHES, members.roster(), members.blocks, speeds(members), lines)
    assert least <= sum(route[1].peer == "a1" and route[0].peer == "a0" for route in routes.values()) <= most


def test_nobody_is_taken_to_be_faster_than_all_others_together_by_far() -> None:
    members = swarm({name: (n, (0, 2)) for n, name in enumerate("abc")}, (1.0, 1.0))
    members.volunteers["a"].computing = 1e-300
    members.volunteers["b"].computing = members.volunteers["c"].computing = 2.0
    assert speeds(members) == pytest.approx({"a": MOST, "b": 1.0, "c": 1.0})


def test_blocks_without_products_are_no_reason_to_divide_by_nothing() -> None:
    members = swarm({"a": (0, (0, 1)), "b": (0, (1, 3))}, (0.0, 1.0, 1.0))
    assert speeds(members) == pytest.approx({"a": 100.0, "b": 1.0})
    assert speeds(swarm({"a": (0, (0, 2))}, (0.0, 0.0)))["a"] > 0
    assert speeds(swarm({}, (1.0,))) == {}


def test_pipelines_of_neighbours_stay_together_where_speeds_differ_a_little() -> None:
    """Three pipelines of four, each with its own cut and speeds: no more ids leave theirs than it
    has places.
    """
    cuts = ((0, 2, 5, 7, 10), (0, 3, 5, 8, 10), (0, 2, 4, 7, 10))
    places = {
        f"{cluster}{stage}": (cluster, place)
        for cluster, cut in enumerate(cuts)
        for stage, place in enumerate(pairwise(cut))
    }
    members = swarm(places, (1.0,) * 10)
    for number, volunteer in enumerate(members.volunteers.values()):
        volunteer.flops_per_second = 1.0 + 0.1 * (number * 7 % 5)
    left = sum(
        count * sum(one[0] != other[0] for one, other in pairwise(way))
        for way, count in routed(members).items()
    )
    assert left <= len(places)


# ── link targets ────────────────────────────────────────────────────────────────────────────────────────────


# ── issue limits ────────────────────────────────────────────────────────────────────────────────────────────

IDS = 64
HANDFUL = few(IDS)
STEPS = 64


def given(issue_limits, steps, does=lambda _number: 0):
    """Ids that h is given in each of `steps`. It counts `does(number)` of them; the rest is taken from it."""
    found = []
    for _ in range(steps):
        limit = issue_limits.limits(("h", "a"), IDS).get("h", IDS // 2)
        counts = does(limit)
        issue_limits.judge({"h": limit - counts, "a": 1}, {"h": counts, "a": IDS // 2}, IDS)
        found.append(limit)
    return found


def faults(number):
    issue_limits = IssueLimits()
    for _ in range(number):
        issue_limits.judge({"h": 5}, {"a": 20}, IDS)
    return issue_limits


def test_nobody_has_a_limit_at_first_and_honest_ones_never():
    issue_limits = IssueLimits()
    assert issue_limits.limits(("a", "h"), IDS) == {}
    for _ in range(STEPS):
        issue_limits.judge({"a": 6, "b": 1}, {"a": 30, "b": 34}, IDS)
    assert issue_limits.limits(("a", "b"), IDS) == {}


@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_it_is_halved_each_time(times):
    issue_limits = faults(times)
    tried = [issue_limits.limits(("h",), IDS)["h"] for _ in range(STEPS)]
    assert sum(tried) == STEPS / 2**times * HANDFUL
    assert set(tried) == {0, HANDFUL}


def test_who_hoards_for_ever_is_asked_ever_less_and_never_not_at_all():
    issue_limits = faults(0)
    assert given(issue_limits, 200)[0] == IDS // 2
    assert sum(given(issue_limits, 200)) <= 2 * HANDFUL
    for _ in range(100):
        issue_limits.judge({"h": 5}, {}, IDS)
    assert sum(issue_limits.limits(("h",), IDS)["h"] for _ in range(int(2 / LEAST))) == 2 * HANDFUL


def test_who_works_again_is_back_within_a_dozen_steps_and_forgiven_later():
    issue_limits = faults(1)
    share = given(issue_limits, 12, does=lambda limit: min(limit, IDS // 2))
    assert share[0] == 0
    assert share[-1] >= IDS // 2
    assert sorted(share) == share
    given(issue_limits, STEPS, does=lambda _limit: IDS // 2)
    assert "h" not in issue_limits.limited


def test_several_are_tried_one_after_the_other():
    issue_limits, peers = IssueLimits(), ("a", "b", "c")
    for _ in range(3):
        issue_limits.judge(dict.fromkeys(peers, 9), {}, 100)
    given = [issue_limits.limits(peers, 100) for _ in range(24)]
    assert max(sum(step.values()) for step in given) == few(100)
    assert all(sum(step[peer] for step in given) >= 2 * few(100) for peer in peers), "each in its turn"


def test_who_works_for_a_while_and_then_hoards_falls_deeper():
    issue_limits = IssueLimits()
    good = {"h": IDS // 2}
    falls = []
    for _ in range(4):
        issue_limits.judge({"h": IDS // 2}, {}, IDS)
        falls.append(issue_limits.limited["h"].handfuls)
        for _ in range(8):
            issue_limits.judge({}, good, IDS)
    assert falls == sorted(falls, reverse=True)
    assert falls[-1] < 0.5 / 2**3 * FORGIVEN**24 * 1.01


def test_so_many_are_remembered():
    issue_limits = IssueLimits()
    for number in range(MAX_PEERS + 10):
        issue_limits.judge({f"peer {number}": 1}, {}, IDS)
    assert len(issue_limits.limited) == MAX_PEERS


# ── in the routes of a step ─────────────────────────────────────────────────────────────────────────────────

ROSTER = {"a": (0, 2), "b": (2, 4), "h": (2, 4)}
HONEST = "ab"


def passing(routes, peer):
    return sum(any(hop.peer == peer for hop in route) for route in routes.values())


def test_a_limit_holds_though_it_claims_to_be_the_fastest():
    speeds = {"a": 1.0, "b": 1.0, "h": 1000.0}
    assert passing(assign_routes(range(IDS), ROSTER, 4, speeds), "h") > 60
    assert passing(assign_routes(range(IDS), ROSTER, 4, speeds, limits={"h": 3}), "h") == 3
    assert passing(assign_routes(range(IDS), ROSTER, 4, speeds, limits={"h": 0}), "h") == 0


def test_there_is_no_limit_where_nobody_else_can_do_it():
    alone = {"a": (0, 2), "h": (2, 4)}
    assert passing(assign_routes(range(IDS), alone, 4, {}, limits={"h": 0}), "h") == IDS


def ways(roster=ROSTER, limits=None, counted=lambda _block, _id: None):
    ids = range(IDS)
    return Assignments(ids, roster, 4, {}, lambda: set(ids), counted, limits=limits or {})


def test_ids_are_taken_from_whom_they_stuck_at_and_only_once_they_go_elsewhere():
    assigned = ways()
    stuck = {task.id for task in assigned.tasks()["a"] if task.route[1].peer == "h"}
    assigned.stuck(stuck)
    assert not assigned.taken, "they are only handed out again"
    assigned.stuck(stuck)
    assert assigned.taken == {"h": len(stuck)}
    assert all(task.route[1].peer == "b" for task in assigned.tasks(stuck)["a"])


def test_what_a_volunteer_is_tried_with_others_get_too():
    assigned = ways(limits={"h": 1})
    passing_h = {task.id for task in assigned.tasks()["a"] if task.route[1].peer == "h"}
    assert len(passing_h) == 1
    assert assigned.tried({*range(IDS)}, 0) == set()
    assert assigned.tried({*range(IDS)}, 1) == passing_h
    assert assigned.hedge(passing_h) == passing_h
    assert assigned.tried({*range(IDS)}, 1) == set()


def test_who_is_on_the_way_of_ids_that_stuck_elsewhere_is_not_to_blame():
    """Ids stuck on ways through h and b, h and c, a and b. Where all count something, all are blamed."""
    assigned = ways()
    assigned._taken = [frozenset("hb"), frozenset("hc"), frozenset("ab")]
    assert assigned.taken == {"h": 2, "b": 2, "c": 1, "a": 1}
    assert assigned.blamed({"a": 6, "b": 1, "c": 5}) == {"h": 2, "a": 1, "b": 1}
    assert assigned.blamed({"a": 6, "c": 5}) == {"h": 2, "b": 2}
    assert assigned.blamed({"a": 6, "b": 1, "c": 5, "h": 1}) == assigned.taken
    assert assigned.blamed({}) == assigned.taken


def test_who_counts_an_id_or_has_left_is_not_to_blame():
    counting = ways(counted=lambda block, _id: "h" if block == 2 else None)
    assert counting.hedge({task.id for task in counting.tasks()["a"] if task.route[1].peer == "h"})
    assert not counting.taken
    roster = dict(ROSTER)
    assigned = ways(roster)
    del roster["h"]
    assigned.again(range(IDS))
    assert not assigned.taken


def test_who_says_that_it_cannot_is_taken_at_its_word():
    assigned = ways()
    stuck = [task.id for task in assigned.tasks()["a"] if task.route[1].peer == "h"]
    assigned.again(stuck[:1], {peer: ROSTER[peer] for peer in HONEST})
    assert assigned.taken == {"h": 1}


def test_two_that_cannot_work_together_are_parted_and_who_accuses_everybody_is_alone():
    roster = {"a": (0, 2), "x": (0, 2), "b": (2, 4), "h": (2, 4)}
    assigned = ways(roster)

    def meet(one, other):
        return sum({one, other} == {hop.peer for hop in route} for route in assigned._routes.values())

    before = meet("x", "h")
    assert before
    moved = assigned.part("x", "h")
    assert len(moved) == before
    assert meet("x", "h") == 0
    assert assigned.part("h", "x") == set(), "it is known"
    load = [meet("a", "b"), meet("a", "h"), meet("x", "b")]
    assert min(load) > 0, "both go on with others"
    assigned.part("x", "b")
    assert passing(assigned._routes, "x") == 0
    assert meet("a", "b") > IDS // 4
    assert meet("a", "h") > IDS // 4
    assigned.hedge(set(range(IDS)))
    assert meet("x", "h") == 0


def test_those_without_whom_there_is_no_way_are_not_parted():
    assigned = ways({"a": (0, 2), "b": (2, 4)})
    assert assigned.part("a", "b") == set()
    assert passing(assigned._routes, "b") == IDS


def test_what_sticks_elsewhere_does_not_end_at_one_with_a_limit():
    roster = ROSTER | {"c": (2, 4)}
    assigned = ways(roster, limits={"h": 0})
    everything = set(range(IDS))
    assigned.hedge(everything)
    assert passing(assigned._routes, "h") == 0
    del roster["b"]
    assigned.again(everything)
    assert passing(assigned._routes, "h") == 0
