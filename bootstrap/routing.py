"""Which holders each microbatch of a step passes: first routes, in proportion to measured speed.

Pure. Ids are routed one after another over the cheapest path, where a block at a peer costs the time at which that
peer would be done with it: a greedy list schedule, so a peer twice as fast is given twice the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetpeer.stages.execution.routes import Roster, Route, cheapest_path


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
