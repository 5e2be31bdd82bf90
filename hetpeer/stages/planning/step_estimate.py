"""Estimate of a swarm's step time and its bottleneck. Pure.

The pipelines run in virtual time until their windows have settled (virtual_swarm.py). The rest of a step,
between two of them: votes, reduce and update, is measured as a whole, since it hardly depends on the division
of blocks. If steps overlap it is hidden behind the work of the next ones, as far as there is any.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetpeer.stages.pipeline.delays import Delays
from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.planning.uplinks import PeerLink
from hetpeer.stages.planning.virtual_swarm import VirtualSwarm, VirtualVolunteer

VARIED = 400
"""Least number of simulated microbatches if their times vary."""
SETTLE = 5
"""Rounds in which windows find their depth; a round is one step, or as many as overlap."""
ROUNDS = 8
"""Rounds after that, whose mean counts: the ends of overlapping steps come at uneven distances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Estimate of one step."""

    seconds: float
    """Seconds from one commit to the next."""
    between_s: float
    """Seconds from a step's last work to the first that needs its update; in `seconds` unless overlapped."""
    staleness: int = 0
    """Steps that begin before the one that they follow is committed."""
    computing: Mapping[str, float]
    """Peer → fraction of the step in which it computes."""
    sending: Mapping[str, float]
    """Peer → fraction of the step in which it sends."""

    @property
    def bottleneck(self) -> tuple[str, str]:
        """(`computing` or `sending`, peer) with the largest fraction."""
        _, what, peer = max(
            (share, what, peer)
            for what, shares in (("computing", self.computing), ("sending", self.sending))
            for peer, share in shares.items()
        )
        return what, peer


def estimate(
    machines: Mapping[str, VirtualVolunteer],
    links: Mapping[tuple[str, str], PeerLink],
    routes: Mapping[int, Route],
    between_s: float = 0.0,
    staleness: int = 0,
    delays: Delays | None = None,
) -> StepEstimate:
    """Estimate of a step of microbatches that take `routes` (microbatch → route).

    `links` has both directions of each two peers that follow one another. For steps that overlap it is the
    time from one to the next, once the pace is even; `delays` says what they are computed with.
    """
    swarm = VirtualSwarm(machines, links, routes, staleness=staleness, delays=delays, between_s=between_s)
    together = staleness + 1
    for _ in range(SETTLE * together):
        swarm.step()
    vary = any(machine.varies for machine in machines.values())
    rounds = max(ROUNDS, math.ceil(VARIED / len(routes))) if vary else ROUNDS
    steps = [swarm.step() for _ in range(rounds * together)]
    passed = sum(step.seconds for step in steps)
    return StepEstimate(
        seconds=max(passed / len(steps), busiest_s(machines, links, routes)),
        between_s=between_s,
        staleness=staleness,
        computing={peer: sum(step.computing[peer] for step in steps) / passed for peer in swarm.windows},
        sending={peer: sum(step.sending[peer] for step in steps) / passed for peer in swarm.windows},
    )


def busiest_s(
    machines: Mapping[str, VirtualVolunteer],
    links: Mapping[tuple[str, str], PeerLink],
    routes: Mapping[int, Route],
) -> float:
    """Seconds of a step's load on the busiest worker, link or uplink: a lower bound in the long run.

    A few steps together may be faster, since some of their work was done before.
    """
    working = {peer: machine.update_s for peer, machine in machines.items()}
    carried = defaultdict(float, {pair: link.sums_bytes for pair, link in links.items()})
    for route in routes.values():
        for hop in route:
            working[hop.peer] += machines[hop.peer].forward_s + machines[hop.peer].backward_s
        for one, other in pairwise(route):
            carried[one.peer, other.peer] += links[one.peer, other.peer].activation_bytes
            carried[other.peer, one.peer] += links[other.peer, one.peer].gradient_bytes
    leaving = dict.fromkeys(machines, 0.0)
    for (sender, _), nbytes in carried.items():
        leaving[sender] += nbytes
    on_links = [nbytes / links[pair].rate for pair, nbytes in carried.items()]
    on_uplinks = [nbytes / machines[sender].uplink for sender, nbytes in leaving.items()]
    return max(*working.values(), *on_links, *on_uplinks, 0.0)
