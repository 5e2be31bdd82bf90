"""Paths through the holders, against a search of all of them."""

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.pipeline.routes import Hop, cheapest_path, rest_of, splice, stands

BLOCKS = 5
ranges = st.integers(0, BLOCKS - 1).flatmap(
    lambda begin: st.tuples(st.just(begin), st.integers(begin + 1, BLOCKS))
)
rosters = st.dictionaries(st.sampled_from("abcdefg"), ranges, max_size=7)
costs = st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from([0.5, 1.0, 2.0, 3.5]))


def covers(route, begin, end):
    borders = [begin, *(hop.end for hop in route)]
    return borders[-1] == end and [hop.begin for hop in route] == borders[:-1]


def price(route, cost):
    return sum(cost.get(hop.peer, 1.0) * (hop.end - hop.begin) for hop in route)


def all_paths(roster, begin, end):
    if begin == end:
        return [()]
    steps = [Hop(p, begin, min(last, end)) for p, (first, last) in roster.items() if first <= begin < last]
    return [(hop, *rest) for hop in steps for rest in all_paths(roster, hop.end, end)]


@given(rosters, costs)
def test_the_cheapest_path_is_the_cheapest_of_all(roster, cost):
    found = cheapest_path(roster, 0, BLOCKS, cost)
    paths = all_paths(roster, 0, BLOCKS)
    if not paths:
        assert found is None
        return
    assert covers(found, 0, BLOCKS)
    assert price(found, cost) == min(price(path, cost) for path in paths)
    assert cheapest_path(dict(reversed(roster.items())), 0, BLOCKS, cost) == found


@given(rosters, costs, st.lists(st.sampled_from([0.0, 0.5, 2.0, 9.0]), min_size=49, max_size=49))
def test_with_prices_of_lines_it_is_the_cheapest_of_all_if_every_beginning_is_gone_on_with(
    roster, cost, prices
):
    lines = dict(zip(product("abcdefg", repeat=2), prices, strict=True))

    def whole(route):
        return price(route, cost) + sum(lines[one.peer, other.peer] for one, other in pairwise(route))

    best = min(map(whole, all_paths(roster, 0, BLOCKS)), default=None)
    for beginnings in (1, 2, len("abcdefg")):
        found = cheapest_path(roster, 0, BLOCKS, cost, lambda *pair: lines[pair], beginnings)
        assert (found is None) == (best is None)
        if found is not None:
            assert covers(found, 0, BLOCKS)
            assert whole(found) >= best
    assert found is None or whole(found) == best


@given(rosters, rosters)
def test_a_spliced_route_covers_the_same_and_keeps_what_stands(roster, left):
    route = cheapest_path(roster, 0, BLOCKS, {})
    if route is None:
        return
    spliced = splice(route, left, {})
    assert covers(spliced, 0, BLOCKS)
    uncovered = {n for n in range(BLOCKS) if not any(b <= n < e for b, e in left.values())}
    for hop in spliced:
        if not stands(hop, left):
            assert hop in route
            assert uncovered.intersection(range(hop.begin, hop.end))
    for one, other in pairwise(spliced):
        assert one.peer != other.peer or not (stands(one, left) and stands(other, left))
    for hop in route:
        if stands(hop, left):
            assert any(
                new.peer == hop.peer and new.begin <= hop.begin and hop.end <= new.end for new in spliced
            )


@given(rosters, st.integers(0, BLOCKS))
def test_the_rest_of_a_route_covers_what_is_left(roster, border):
    route = cheapest_path(roster, 0, BLOCKS, {})
    if route is not None:
        rest = rest_of(route, border)
        assert covers(rest, border, BLOCKS)
        assert [hop.peer for hop in rest] == [hop.peer for hop in route if hop.end > border]


def test_adjacent_gaps_are_bridged_as_one():
    route = (Hop("a", 0, 1), Hop("b", 1, 2), Hop("c", 2, 3), Hop("d", 3, 4))
    roster = {"a": (0, 1), "d": (3, 4), "x": (1, 3), "y": (1, 2), "z": (2, 3)}
    assert splice(route, roster, {}) == (Hop("a", 0, 1), Hop("x", 1, 3), Hop("d", 3, 4))
    assert splice(route, roster, {"x": 9.0}) == (
        Hop("a", 0, 1),
        Hop("y", 1, 2),
        Hop("z", 2, 3),
        Hop("d", 3, 4),
    )
    assert splice(route, {"a": (0, 3), "d": (3, 4)}, {}) == (Hop("a", 0, 3), Hop("d", 3, 4))


def test_what_nobody_holds_stays_and_the_rest_is_bridged():
    route = (Hop("a", 0, 1), Hop("b", 1, 2), Hop("c", 2, 3), Hop("d", 3, 4))
    roster = {"a": (0, 1), "y": (1, 2), "d": (3, 4)}
    moved = (Hop("b", 0, 1), Hop("a", 1, 5))
    assert splice(moved, {"a": (0, 1)}, {}) == (Hop("a", 0, 1), Hop("a", 1, 5))
    assert splice(route, roster, {}) == (Hop("a", 0, 1), Hop("y", 1, 2), Hop("c", 2, 3), Hop("d", 3, 4))
    assert splice(route, {}, {}) == route
