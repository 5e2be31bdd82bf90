"""Speed of a step's volunteers at their places, and costs of their links, as routing counts them.

Pure. These are claims: a volunteer that lies gets more or less work than it should, and the run is slower.
What counts does not depend on them.
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
"""No volunteer is taken to be more than this many times as fast as the median."""
LEAST = 0.01
"""No block is taken to be lighter than this part of the median: work without matrix products takes
time, too.
"""


def rates(ready: Collection[Volunteer], costs: Sequence[BlockDemand]) -> dict[str, float]:
    """Volunteer → blocks per second, forward and back, on average over its place.

    If it has trained, from its reported times. Otherwise from its speed in rehearsal or matrix products,
    scaled by the median ratio of those that have trained. If nobody has, the numbers are only good for
    comparing.
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
    """Costs of links between `ready` volunteers, in block times of the fastest by `speeds`.

    Links take as long as `compression` makes them; adaptive ones aim at their senders' `targets` in seconds.
    Leaving the cluster on a link that was not measured costs as much as one more microbatch at a mean peer.
    Clusters are made of neighbours, and holders in other clusters may be far away. `mixed`: leaving costs
    next to nothing. Spot checks find a liar by what it sends to several others, so routes must meet many.
    """
    peers = {volunteer.peer for volunteer in ready}
    fastest = max(speeds.values(), default=1.0)
    trained = any(volunteer.computing for volunteer in ready)
    seconds: dict[tuple[str, str], float] = {}
    for volunteer in ready:
        for peer, took in volunteer.links.items():
            if trained and took and peer in peers:
                carried = _carried_s(took, compression, targets.get(volunteer.peer, 0.0)) * fastest
                for pair in ((volunteer.peer, peer), (peer, volunteer.peer)):  # the way back
                    seconds[pair] = seconds.get(pair, 0.0) + carried
    price = leaving({v.peer: v.place for v in ready if v.place is not None}, speeds, mixed=mixed)
    return LinkCosts({v.peer: v.cluster for v in ready}, seconds, price, mixed=mixed)


def leaving(roster: Roster, speeds: Mapping[str, float], *, mixed: bool = False) -> float:
    """Cost of leaving the cluster on a link that was not measured, in block times of the fastest peer."""
    fastest = max(speeds.values(), default=1.0)
    more = [fastest / speeds[peer] * (end - begin) ** 2 for peer, (begin, end) in roster.items()]
    return SLIGHT if mixed or not more else max(SLIGHT, fmean(more))


def _carried_s(took: float, compression: Compression, target: float) -> float:
    """Seconds of a bundle that takes `took` uncompressed."""
    least = took / min(compression.forward, compression.backward)
    if not compression.adaptive:
        return least
    return max(least, min(took, target)) if target else took
