"""Who does which blocks of a microbatch: hops, and paths through the holders that are there.

Pure. A route is a tuple of hops that cover the blocks of the model in order. The coordinator makes the first one; a
sender whose next hop is gone splices around it without asking anybody, and rejoins the old route behind the gap so
that peers further down can answer with what they have kept.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Hop(NamedTuple):
    """`peer` runs blocks `begin` (inclusive) to `end` (exclusive)."""

    peer: str
    begin: int
    end: int


Route = tuple[Hop, ...]
Roster = Mapping[str, tuple[int, int]]
"""Active holders: peer id → (begin, end) of the blocks that it holds."""


def cheapest_path(
    roster: Roster,
    begin: int,
    end: int,
    cost: Mapping[str, float],
    between: Callable[[str, str], float] = lambda _sender, _to: 0.0,
    beginnings: int = 1,
) -> Route | None:
    """The path over blocks [begin, end) through `roster` with the least sum of `cost` per block run.

    `cost[peer]` is the price of one block at that peer (default 1.0); ties go to fewer hops, then to the smaller peer
    id, so that every caller with the same view finds the same path. None if some block has no holder. Dijkstra over
    the borders; a peer always runs to the end of what it holds. `between` is the price of going from one peer to another: with it the path is the best
    of those whose beginnings are among the `beginnings` best to their borders, each by another last peer; with as many as there are peers that is the cheapest of all.
    """
    heap: list[tuple[float, int, Route, int]] = [(0.0, 0, (), begin)]
    settled: defaultdict[int, set[str]] = defaultdict(set)
    while heap:
        price, hops, route, border = heapq.heappop(heap)
        if border == end:
            return route
        last, known = route[-1].peer if route else "", settled[border]
        if last in known or len(known) == beginnings:
            continue
        known.add(last)
        for peer, (first, beyond) in roster.items():
            if first <= border < beyond:
                hop = Hop(peer, border, min(beyond, end))
                step = cost.get(peer, 1.0) * (hop.end - hop.begin)
                step += between(last, peer) if route else 0.0
                heapq.heappush(heap, (price + step, hops + 1, (*route, hop), hop.end))
    return None


def splice(route: Route, roster: Roster, cost: Mapping[str, float]) -> Route:
    """`route` with every hop that does not stand replaced, as far as `roster` has others.

    Adjacent gaps are bridged as one where that is possible, hops that stand are kept, and those of one peer that are neighbours
    become one. A hop that nobody can replace stays: whoever comes to it waits for a new holder of its blocks.
    """
    result: list[Hop] = []
    gap: list[Hop] = []
    for hop in (*route, None):
        if hop is not None and not stands(hop, roster):
            gap.append(hop)
            continue
        for new in _bridge(gap, roster, cost) if gap else ():
            _append(result, new, roster)
        gap.clear()
        if hop is not None:
            _append(result, hop, roster)
    return tuple(result)


def _bridge(gap: Sequence[Hop], roster: Roster, cost: Mapping[str, float]) -> Route:
    """Hops instead of `gap`: all of it over one path, or else each of its hops that can be replaced."""
    whole = cheapest_path(roster, gap[0].begin, gap[-1].end, cost)
    if whole is not None:
        return whole
    return tuple(new for hop in gap for new in cheapest_path(roster, hop.begin, hop.end, cost) or (hop,))


def blocks_left(route: Route) -> int:
    """Blocks from where `route` begins to the loss. It falls from hop to hop, however the way further on is changed, which the
    number of hops that are left does not: whatever may wait for what is ordered by it.
    """
    return route[-1].end - route[0].begin


def rest_of(route: Route, border: int) -> Route:
    """The part of `route` from `border` on; a hop that straddles it is cut there."""
    return tuple(Hop(hop.peer, max(hop.begin, border), hop.end) for hop in route if hop.end > border)


def _append(hops: list[Hop], hop: Hop, roster: Roster) -> None:
    if hops and hops[-1].peer == hop.peer:
        both = Hop(hop.peer, hops[-1].begin, hop.end)
        if stands(both, roster):  # else one of them stays for want of another holder
            hops[-1] = both
            return
    hops.append(hop)


def stands(hop: Hop, roster: Roster) -> bool:
    """Whether its peer is there and holds these blocks."""
    held = roster.get(hop.peer)
    return held is not None and held[0] <= hop.begin and hop.end <= held[1]
