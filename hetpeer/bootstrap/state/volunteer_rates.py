"""How fast the volunteers of a step are at their places, and what it costs to go from one to another, as routes count it (routing.py, link_costs.py). Pure.

Claims, as all that volunteers say of themselves: who lies gets more or less to do than it should, and the run is slower. What counts is not touched by it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from hetpeer.bootstrap.state.link_costs import SLIGHT, LinkCosts
from hetpeer.bootstrap.state.volunteer import Volunteer
from hetpeer.stages.pipeline.routes import Roster
from hetpeer.stages.planning.swarms.plan_inputs import Compression

if TYPE_CHECKING:
    from hetpeer.bootstrap.state.membership import BlockDemand

MOST = 100.0
"""Nobody is taken to be more than so many times as fast as the middle one."""
LEAST = 0.01
"""No block is taken to be lighter than this part of the middle one: what has no product of matrices takes time, too."""


def rates(ready: Collection[Volunteer], costs: Sequence[BlockDemand]) -> dict[str, float]:
    """Blocks that each does in a second with a microbatch, there and back, on average over its place.

    By what it took in training, if it has said so: it has others to do beside, limits, and blocks that are heavier than others. Else by what it reached before, on these blocks or in products of matrices:
    training is taken to be as much slower than that as it is for the others, in the middle. If nobody has trained these are no seconds, but as good for comparing.
    """
    usual = median(cost.flops for cost in costs) or 1.0
    guessed, said = {}, {}
    for volunteer in ready:
        begin, end = volunteer.place or (0, 1)
        flops = fmean(max(cost.flops, LEAST * usual) for cost in costs[begin:end])
        guessed[volunteer.peer] = max(volunteer.flops_per_second, 1.0) / flops
        if volunteer.computing:
            said[volunteer.peer] = (end - begin) / volunteer.computing
    slower = median(said[peer] / guessed[peer] for peer in said) if said else 1.0
    found = {peer: said.get(peer, slower * rate) for peer, rate in guessed.items()}
    limit = MOST * median(found.values()) if found else 0.0
    return {peer: min(rate, limit) for peer, rate in found.items()}


def lines(
    ready: Collection[Volunteer],
    speeds: Mapping[str, float],
    compression: Compression,
    targets: Mapping[str, float],
    *,
    mixed: bool = False,
) -> LinkCosts:
    """What lies between them, in the time of a block at the fastest by `speeds`, those of `rates`. Lines take as long as `compression` makes it; adaptive ones aim at their senders' `targets` in seconds. To leave one's cluster on a line that nobody has used is as dear as one microbatch more
    is to a peer, in the mean: clusters are made of neighbours, and others that have the next blocks may be far away. `mixed`: for nothing, where all else is equal, since spot checks find out who gives something
    false to several others, and of two that meet each other alone nobody knows who lies.
    """
    peers = {volunteer.peer for volunteer in ready}
    fastest = max(speeds.values(), default=1.0)
    trained = any(volunteer.computing for volunteer in ready)
    seconds: dict[tuple[str, str], float] = {}
    for volunteer in ready:
        for peer, took in volunteer.links.items():
            if trained and took and peer in peers:
                carried = _carried_s(took, compression, targets.get(volunteer.peer, 0.0)) * fastest
                for pair in ((volunteer.peer, peer), (peer, volunteer.peer)):  # back as well
                    seconds[pair] = seconds.get(pair, 0.0) + carried
    price = leaving({v.peer: v.place for v in ready if v.place is not None}, speeds, mixed=mixed)
    return LinkCosts({v.peer: v.cluster for v in ready}, seconds, price, mixed=mixed)


def leaving(roster: Roster, speeds: Mapping[str, float], *, mixed: bool = False) -> float:
    """What it costs to leave one's cluster on a line that nobody has used, in the time of a block at the fastest."""
    fastest = max(speeds.values(), default=1.0)
    more = [fastest / speeds[peer] * (end - begin) ** 2 for peer, (begin, end) in roster.items()]
    return SLIGHT if mixed or not more else max(SLIGHT, fmean(more))


def _carried_s(took: float, compression: Compression, target: float) -> float:
    """Seconds of a bundle that takes `took` uncompressed."""
    least = took / min(compression.forward, compression.backward)
    if not compression.adaptive:
        return least
    return max(least, min(took, target)) if target else took
