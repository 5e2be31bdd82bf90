"""Search for routes: cheap paths through all blocks, around pairs of peers that are kept apart.

Pure. Ids are routed one after another over the cheapest path. A block at a peer costs the time at which that
peer would be done with it, and so does a link (link_costs.py). This is greedy list scheduling: a peer that is
twice as fast gets twice the work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType

from hetpeer.bootstrap.state.link_costs import LinkCosts
from hetpeer.stages.pipeline.routes import Roster, Route, cheapest_path

LOOKS = 512
"""Beginnings of a path that are followed, times peers: keeps routing of a step short."""
LEAST_LOOKS = 2
"""The same where some peers are kept apart: nobody can make routing slow by naming others."""
TRIES = 16
"""Peers that are left out one after another to keep pairs apart."""
APART = 1e12
"""Added cost of a link between two peers that are kept apart."""
LAST = 1e9
"""Added cost of a peer that is over its limit: it is used only where nobody else holds a block."""


def assign_routes(
    ids: Iterable[int],
    roster: Roster,
    blocks: int,
    speeds: Mapping[str, float],
    lines: LinkCosts | None = None,
    limits: Mapping[str, int] = MappingProxyType({}),
    apart: Collection[frozenset[str]] = frozenset(),
) -> dict[int, Route]:
    """A route over blocks 0..`blocks` for every id. `roster` must cover every block.

    `limits`: peer → most ids that it gets, if others can do the rest. Nothing passes between two peers that
    are kept `apart`, if there is another route.
    """
    lines, left = lines or LinkCosts(), dict(limits)
    fastest = max(speeds.values(), default=1.0)
    slowness = {peer: fastest / max(speeds.get(peer, fastest), 1e-9) for peer in roster}
    load = dict.fromkeys(roster, 0.0)
    routes: dict[int, Route] = {}
    for microbatch in ids:
        cost = {peer: load[peer] + slowness[peer] + LAST * (left.get(peer, 1) <= 0) for peer in roster}
        route = path_around(roster, 0, blocks, cost, apart, lines)
        assert route is not None, "the caller has checked that every block has a holder"
        for hop in route:
            load[hop.peer] += slowness[hop.peer] * (hop.end - hop.begin)
        for peer in left.keys() & {hop.peer for hop in route}:
            left[peer] -= 1
        lines.used(route)
        routes[microbatch] = route
    return routes


def _path(roster: Roster, begin: int, end: int, cost: Mapping[str, float], lines: LinkCosts) -> Route | None:
    """The cheapest path, including links.

    In swarms of several dozen peers only some beginnings are followed. Where routes are to be mixed, the
    first block is chosen before links are looked at.
    """
    beginnings = 1 if lines.mixed or not roster else max(1, LOOKS // len(roster))
    return cheapest_path(roster, begin, end, cost, lines, beginnings)


def path_around(
    roster: Roster,
    begin: int,
    end: int,
    cost: Mapping[str, float],
    apart: Collection[frozenset[str]],
    lines: LinkCosts | None = None,
) -> Route | None:
    """A cheap path (`_path`) on which nothing passes between two peers that are `apart`; None if a block has
    no holder.

    It leaves out the one of a pair that is apart from more others. If a few tries do not find such a path, it
    returns one with few of these links.
    """

    def cheap(some: Roster) -> Route | None:
        return (
            cheapest_path(some, begin, end, cost) if lines is None else _path(some, begin, end, cost, lines)
        )

    def between(sender: str, to: str) -> float:
        return (lines or LinkCosts())(sender, to) + APART * (frozenset((sender, to)) in apart)

    others, route = dict(roster), cheap(roster)
    for _ in range(TRIES):
        if route is None or not meets(route, apart):
            break
        met = next(pair for pair in _pairs(route) if pair in apart)
        del others[min(met, key=lambda peer: (-sum(peer in pair for pair in apart), peer))]
        route = cheap(others)
    if route is not None and not meets(route, apart):
        return route
    return cheapest_path(roster, begin, end, cost, between, max(LEAST_LOOKS, LOOKS // max(len(roster), 1)))


def _pairs(route: Route) -> list[frozenset[str]]:
    """Pairs of peers that are next to each other on the route."""
    return [frozenset((hop.peer, to.peer)) for hop, to in pairwise(route)]


def meets(route: Route, apart: Collection[frozenset[str]]) -> int:
    """How many links of the route are between peers that are `apart`."""
    return sum(pair in apart for pair in _pairs(route)) if apart else 0
