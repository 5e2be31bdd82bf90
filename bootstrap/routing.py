"""Which holders each microbatch of a step passes: first routes in proportion to measured speed, and others when it is stuck.

Pure. Ids are routed one after another over the cheapest path, where a block at a peer costs the time at which that
peer would be done with it: a greedy list schedule, so a peer twice as fast is given twice the work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hetpeer.averaging.messages import Task
from hetpeer.stages.execution.routes import Roster, Route, cheapest_path, splice, stands

DETOUR = 3.0
"""How much dearer a peer is where an id has got stuck before."""


def assign_routes(
    ids: Iterable[int], roster: Roster, blocks: int, speeds: Mapping[str, float]
) -> dict[int, Route]:
    """A route over blocks 0..`blocks` for every id. `roster` must cover every block."""
    fastest = max(speeds.values(), default=1.0)
    slowness = {peer: fastest / max(speeds.get(peer, fastest), 1e-9) for peer in roster}
    load = dict.fromkeys(roster, 0.0)
    routes: dict[int, Route] = {}
    for microbatch in ids:
        cost = {peer: load[peer] + slowness[peer] for peer in roster}
        route = cheapest_path(roster, 0, blocks, cost)
        assert route is not None, "the caller has checked that every block has a holder"
        for hop in route:
            load[hop.peer] += slowness[hop.peer] * (hop.end - hop.begin)
        routes[microbatch] = route
    return routes


class Assignments:
    """The ways of a step's ids, and how often each was handed out. `roster` is the step's own, as it changes."""

    def __init__(self, ids: Iterable[int], roster: Roster, blocks: int, speeds: Mapping[str, float]) -> None:
        self._roster = roster
        self._blocks = blocks
        self._routes = assign_routes(ids, roster, blocks, speeds)
        self._attempts: dict[int, int] = {}
        self._stalled: set[int] = set()
        self._hedged: set[int] = set()

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._routes

    def tasks(self, first: str, ids: Collection[int] | None = None) -> tuple[Task, ...]:
        """Those of `ids` (default: all) that begin at `first`, as it is told."""
        return tuple(
            Task(id=i, route=route, attempt=self._attempts.get(i, 0))
            for i, route in sorted(self._routes.items())
            if route[0].peer == first and (ids is None or i in ids)
        )

    def beginning_at(self, peers: Collection[str]) -> set[int]:
        """Ids whose first hop is one of `peers`."""
        return {i for i, route in self._routes.items() if route[0].peer in peers}

    def without_beginning(self) -> set[int]:
        """Ids whose first block nobody held when they were to be handed out."""
        return {i for i, route in self._routes.items() if not stands(route[0], self._roster)}

    def again(self, ids: Iterable[int], roster: Roster | None = None) -> dict[str, set[int]]:
        """Hand `ids` out again, around who is not in `roster` (default: the step's): first hop → its ids.

        An id that nobody can begin is left out: it is handed out once somebody has joined.
        """
        roster = self._roster if roster is None else roster
        handed: dict[str, set[int]] = {}
        for microbatch in sorted(self._routes.keys() & set(ids)):
            way = splice(self._routes[microbatch], roster, {})
            if stands(way[0], roster):
                self._routes[microbatch] = way
                self._attempts[microbatch] = self._attempts.get(microbatch, 0) + 1
                handed.setdefault(way[0].peer, set()).add(microbatch)
        return handed

    def stuck(self, undone: set[int]) -> None:
        """`undone` made no progress for too long: what was so the last time, too, goes another way from now on."""
        again, self._stalled = undone & self._stalled, undone
        for microbatch in again:
            self._routes[microbatch] = self._detour(microbatch)

    def hedge(self, last: set[int]) -> set[int]:
        """Choose another way for `last`, once for each id; returns those for which there is one."""
        fresh = last - self._hedged
        self._hedged |= fresh
        other = {i: way for i in fresh if (way := self._detour(i)) != self._routes[i]}
        self._routes |= other
        return set(other)

    def _detour(self, microbatch: int) -> Route:
        """Another way for an id that got stuck on the one it has, if there is one."""
        route = self._routes[microbatch]
        cost = {hop.peer: DETOUR for hop in route}
        return cheapest_path(self._roster, 0, self._blocks, cost) or route
