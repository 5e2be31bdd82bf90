"""How long a step of a swarm will take, and what it waits for. Pure.

The pipelines run in virtual time until their windows are settled (virtual_swarm.py). What a step takes besides, the decision
between two of them, the sums and the update, is measured as a whole: it hardly depends on who does which blocks. Where steps overlap it is
hidden behind the work of the next ones, as far as there is any.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.planning.uplinks import PeerLink
from hetpeer.stages.planning.virtual_swarm import VirtualSwarm, VirtualVolunteer

VARIED = 400
"""Microbatches that are looked at, at least, where their times differ."""
SETTLE = 5
"""Rounds in which windows find their depth: of one step, or of as many as overlap."""
ROUNDS = 8
"""After that; their mean counts, as the ends of steps that overlap come now closer together and now farther apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one step."""

    seconds: float
    """From one commit to the next."""
    between_s: float
    """Between the last work of a step and the first that needs its update: a part of these seconds, unless steps overlap."""
    staleness: int = 0
    """So many steps begin before the one that they follow is committed."""
    computing: Mapping[str, float]
    """Peer → the part of the step in which it computes, 0…1."""
    sending: Mapping[str, float]
    """Peer → the part of the step in which it sends, 0…1."""

    @property
    def bottleneck(self) -> tuple[str, str]:
        """(`computing` or `sending`, peer): what is busy for the longest part of the step."""
        _, what, peer = max(
            (share, what, peer)
            for what, shares in (("computing", self.computing), ("sending", self.sending))
            for peer, share in shares.items()
        )
        return what, peer


def estimate(
    machines: Mapping[str, VirtualVolunteer],
    lines: Mapping[tuple[str, str], PeerLink],
    routes: Mapping[int, Route],
    between_s: float = 0.0,
    staleness: int = 0,
) -> Estimate:
    """A step of microbatches that take `routes`. `lines` need both ways of each two peers that follow one another. Of steps that overlap it is
    the time from one to the next, once all goes evenly.
    """
    swarm = VirtualSwarm(machines, lines, routes, staleness=staleness, between_s=between_s)
    together = staleness + 1
    for _ in range(SETTLE * together):
        swarm.step()
    vary = any(machine.varies for machine in machines.values())
    rounds = max(ROUNDS, math.ceil(VARIED / len(routes))) if vary else ROUNDS
    steps = [swarm.step() for _ in range(rounds * together)]
    passed = sum(step.seconds for step in steps)
    return Estimate(
        seconds=max(passed / len(steps), busiest_s(machines, lines, routes)),
        between_s=between_s,
        staleness=staleness,
        computing={peer: sum(step.computing[peer] for step in steps) / passed for peer in swarm.windows},
        sending={peer: sum(step.sending[peer] for step in steps) / passed for peer in swarm.windows},
    )


def busiest_s(
    machines: Mapping[str, VirtualVolunteer],
    lines: Mapping[tuple[str, str], PeerLink],
    routes: Mapping[int, Route],
) -> float:
    """What a step asks of the busiest worker, line or uplink: none can be faster for long. (Some steps together may: of their work some was done before.)"""
    working = {peer: machine.update_s for peer, machine in machines.items()}
    carried = defaultdict(float, {pair: line.sums_bytes for pair, line in lines.items()})
    for route in routes.values():
        for hop in route:
            working[hop.peer] += machines[hop.peer].forward_s + machines[hop.peer].backward_s
        for one, other in pairwise(route):
            carried[one.peer, other.peer] += lines[one.peer, other.peer].activation_bytes
            carried[other.peer, one.peer] += lines[other.peer, one.peer].gradient_bytes
    leaving = dict.fromkeys(machines, 0.0)
    for (sender, _), nbytes in carried.items():
        leaving[sender] += nbytes
    on_lines = [nbytes / lines[pair].rate for pair, nbytes in carried.items()]
    on_uplinks = [nbytes / machines[sender].uplink for sender, nbytes in leaving.items()]
    return max(*working.values(), *on_lines, *on_uplinks, 0.0)
