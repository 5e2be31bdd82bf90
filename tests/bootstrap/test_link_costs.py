"""Estimated speed of volunteers, and when routes leave a cluster."""

from collections import Counter
from itertools import pairwise

import pytest

from hetpeer.bootstrap.state.link_costs import MOST, link_costs, link_targets, rates
from hetpeer.bootstrap.state.membership import BlockDemand, LifeCycle, Membership, VolunteerState
from hetpeer.stages.pipeline.routes import assign_routes
from hetpeer.stages.planning.swarms.plan_inputs import Compression

IDS = range(24)
ADAPTIVE = Compression(forward=100.0, backward=100.0, adaptive=True)
INT8 = Compression(forward=3.97, backward=3.97)


def swarm(places: dict[str, tuple[int, tuple[int, int]]], flops: tuple[float, ...]) -> Membership:
    """Volunteers of 1 FLOP/s each: name → cluster and blocks."""
    costs = [BlockDemand(elements=1, memory_bytes=1, flops=one) for one in flops]
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
    routes = assign_routes(IDS, members.roster(), members.blocks, speeds(members), links)
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
    routes = assign_routes(IDS, members.roster(), members.blocks, speeds(members), lines)
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


def stages(**computing: float) -> list[VolunteerState]:
    """Two stages: names with a have the first block, with b the second.

    Each knows its links, of a fifth of a second.
    """
    found = []
    for name, seconds in computing.items():
        one = VolunteerState(name, 1, 0.0, place=(0, 1) if name[0] == "a" else (1, 2), computing=seconds)
        one.links = {other: 0.2 for other in computing if other[0] != name[0]}
        found.append(one)
    return found


def test_a_slow_one_among_several_lets_nobody_elses_links_be_slow() -> None:
    """It does a thirtieth of the microbatches.

    Once all links aimed at its ten seconds, and nothing was compressed.
    """
    ready = stages(a1=1.0, a2=1.0, a3=10.0, b1=1.0, b2=1.0, b3=1.0)
    found = link_targets(ready, 10.0)
    assert found["a1"] == found["a2"] == pytest.approx(1.0)
    assert found["a3"] == pytest.approx(10.0), "its own may take as long as it does"
    assert found["b1"] == pytest.approx(3.0 / 2.1), "the first stage has 2.1 a second for the three of them"
    ready[2].computing = 1e-9
    assert link_targets(ready, 10.0)["a1"] == pytest.approx(1.0), (
        "no link is to take longer than the slowest computes"
    )
    ready[2].computing, ready[5].computing = 0.01, 4.0
    assert link_targets(ready, 10.0)["a1"] > 3.0, "it seems to do nearly all"
    assert link_targets(ready, 10.0, limited={"a3"})["a1"] == pytest.approx(2.0 / 2.0)


def test_who_alone_has_a_block_decides_for_all() -> None:
    found = link_targets(stages(a1=10.0, b1=1.0, b2=1.0), 10.0)
    assert found == {"a1": pytest.approx(10.0), "b1": pytest.approx(10.0), "b2": pytest.approx(10.0)}


def test_of_several_lines_the_best_counts_and_none_is_shrunk_further_than_the_author_allows() -> None:
    ready = stages(a1=0.1, b1=0.1, b2=0.1)
    ready[0].links = {"b1": 5.0, "b2": 50.0}
    assert link_targets(ready, 10.0)["a1"] == pytest.approx(0.5)


def test_nothing_is_known_before_a_line_was_measured_and_unknown_ones_are_like_the_others() -> None:
    ready = stages(a1=1.0, b1=2.0, b2=0.0)
    assert link_targets(ready, 10.0)["b2"] == pytest.approx(
        link_targets(stages(a1=1.0, b1=2.0, b2=1.5), 10.0)["b2"]
    )
    for one in ready:
        one.links = {}
    assert link_targets(ready, 10.0) == {}
    assert link_targets([], 10.0) == {}
