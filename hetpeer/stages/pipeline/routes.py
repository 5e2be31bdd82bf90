"""Routes: the hops of a microbatch over its blocks, and paths through the present holders.

Pure. A route is a tuple of hops that cover the blocks of the model in order. The coordinator makes the first
one. A sender whose next hop is lost splices around it without asking anybody, and rejoins the old route
behind the gap, so that later peers can answer with what they have kept.
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
    """The path over blocks [begin, end) through `roster` with the least total cost; None if a block has no
    holder.

    `cost[peer]` is the price of one block at that peer (default 1.0). Ties go to fewer hops, then to the
    smaller peer id, so that every caller with the same view finds the same path. It is Dijkstra over the
    borders; a peer always runs to the end of what it holds. `between` is the price of going from one peer to
    another. With it, each border keeps the `beginnings` cheapest paths to it, each with another last peer;
    with as many as there are peers the result is optimal.
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
    """`route` with every invalid hop replaced, as far as `roster` has other holders.

    Adjacent gaps are bridged as one if possible, valid hops are kept, and neighbouring hops of one peer are
    joined. A hop without a replacement stays: a task that gets there waits for a new holder of its blocks.
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
    """Hops instead of `gap`: one path over all of it, or else a path for each hop that can be replaced."""
    whole = cheapest_path(roster, gap[0].begin, gap[-1].end, cost)
    if whole is not None:
        return whole
    return tuple(new for hop in gap for new in cheapest_path(roster, hop.begin, hop.end, cost) or (hop,))


def rest_of(route: Route, border: int) -> Route:
    """The part of `route` from block `border` on; a hop that straddles it is cut there."""
    return tuple(Hop(hop.peer, max(hop.begin, border), hop.end) for hop in route if hop.end > border)


def _append(hops: list[Hop], hop: Hop, roster: Roster) -> None:
    if hops and hops[-1].peer == hop.peer:
        both = Hop(hop.peer, hops[-1].begin, hop.end)
        if stands(both, roster):  # else one of them stays for want of another holder
            hops[-1] = both
            return
    hops.append(hop)


def stands(hop: Hop, roster: Roster) -> bool:
    """Whether the hop is valid: its peer is in `roster` and holds its blocks."""
    held = roster.get(hop.peer)
    return held is not None and held[0] <= hop.begin and hop.end <= held[1]
