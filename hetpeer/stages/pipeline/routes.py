"""Routes: the hops of a microbatch over its blocks, the search for cheap ones, and detours around gaps.

Pure. A route is a tuple of hops that cover the blocks of the model in order. The coordinator makes the first
one. A sender whose next hop is lost splices around it without asking anybody, and rejoins the old route
behind the gap, so that later peers can answer with what they have kept.

The coordinator routes microbatches one after another over the cheapest path, around pairs of peers that are
kept apart. A block at a peer costs the time at which that peer would be done with it, and so does a link.
This is greedy list scheduling: a peer that is twice as fast gets twice the work.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

SLIGHT = 0.5
"""Cost of leaving the cluster, in block times of the fastest peer: it decides only between equal routes."""
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


# ── routes of a step ────────────────────────────────────────────────────────────────────────────────────────


class LinkCosts:
    """Cost of each link for the next microbatch; it grows with the microbatches routed over it.

    `clusters`: peer → its cluster. `seconds`: measured link (from, to) → time of a microbatch, forward and
    back, in block times of the fastest peer. `leaving`: cost of leaving the cluster where nothing was
    measured. `mixed`: routes are to meet many others, whatever that costs.
    """

    def __init__(
        self,
        clusters: Mapping[str, int] | None = None,
        seconds: Mapping[tuple[str, str], float] | None = None,
        leaving: float = SLIGHT,
        *,
        mixed: bool = False,
    ) -> None:
        self.mixed = mixed
        self._leaving = leaving
        self._clusters = dict(clusters or {})
        self._seconds = dict(seconds or {})
        self._load: dict[tuple[str, str], float] = {}
        self._known: dict[str, tuple[int, float]] = {}
        """Sender → how many of its links were measured, and the sum of their costs."""
        for (sender, _), took in self._seconds.items():
            self._dearer(sender, 1, took)

    def __call__(self, sender: str, to: str) -> float:
        """Cost of the next microbatch on the link from `sender` to `to`."""
        if (sender, to) in self._seconds:
            return self._price(sender, to)
        if self._clusters.get(sender) == self._clusters.get(to):
            return 0.0
        lines, price = self._known.get(sender, (1, 0.0))
        return self._leaving + price / lines

    def _price(self, sender: str, to: str) -> float:
        return self._load.get((sender, to), 0.0) + self._seconds[sender, to]

    def _dearer(self, sender: str, lines: int, price: float) -> None:
        known, before = self._known.get(sender, (0, 0.0))
        self._known[sender] = known + lines, before + price

    def used(self, route: Route) -> None:
        """Note that one more microbatch takes this route."""
        for one, other in pairwise(route):
            pair = (one.peer, other.peer)
            if (took := self._seconds.get(pair)) is not None:
                self._load[pair] = self._load.get(pair, 0.0) + took
                self._dearer(one.peer, 0, took)


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
        route = path_around(roster, blocks, cost, apart, lines)
        assert route is not None, "the caller has checked that every block has a holder"
        for hop in route:
            load[hop.peer] += slowness[hop.peer] * (hop.end - hop.begin)
        for peer in left.keys() & {hop.peer for hop in route}:
            left[peer] -= 1
        lines.used(route)
        routes[microbatch] = route
    return routes


def path_around(
    roster: Roster,
    blocks: int,
    cost: Mapping[str, float],
    apart: Collection[frozenset[str]],
    lines: LinkCosts | None = None,
) -> Route | None:
    """A cheap path on which nothing passes between two peers that are `apart`; None if a block has no holder.

    It leaves out the one of a pair that is apart from more others. If a few tries do not find such a path, it
    returns one with few of these links. In swarms of several dozen peers only some beginnings are followed.
    Where routes are to be mixed, the first block is chosen before links are looked at.
    """

    def cheap(some: Roster) -> Route | None:
        if lines is None:
            return cheapest_path(some, 0, blocks, cost)
        beginnings = 1 if lines.mixed or not some else max(1, LOOKS // len(some))
        return cheapest_path(some, 0, blocks, cost, lines, beginnings)

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
    return cheapest_path(roster, 0, blocks, cost, between, max(LEAST_LOOKS, LOOKS // max(len(roster), 1)))


def _pairs(route: Route) -> list[frozenset[str]]:
    """Pairs of peers that are next to each other on the route."""
    return [frozenset((hop.peer, to.peer)) for hop, to in pairwise(route)]


def meets(route: Route, apart: Collection[frozenset[str]]) -> int:
    """Number of the route's links between peers that are `apart`."""
    return sum(pair in apart for pair in _pairs(route)) if apart else 0


# ── around gaps ─────────────────────────────────────────────────────────────────────────────────────────────


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
