"""How long a step of a swarm will take, and what it waits for. Pure.

The pipelines run in virtual time until their windows are settled (virtual.py). What a step takes besides, the decision
between two of them, the sums and the update, is measured as a whole: it hardly depends on who does which blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from hetpeer.stages.execution.routes import Route
from hetpeer.stages.planning.uplinks import Line
from hetpeer.stages.planning.virtual import Machine, VirtualSwarm

SETTLE = 5
"""Steps in which windows find their depth."""
STEPS = 3
"""Steps after that; the middle one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one step."""

    seconds: float
    """From one commit to the next."""
    between_s: float
    """Of these, between the last work of a step and the first of the next."""
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
    machines: Mapping[str, Machine],
    lines: Mapping[tuple[str, str], Line],
    routes: Mapping[int, Route],
    between_s: float = 0.0,
) -> Estimate:
    """A step of microbatches that take `routes`. `lines` need both ways of each two peers that follow one another."""
    swarm = VirtualSwarm(machines, lines, routes)
    for _ in range(SETTLE):
        swarm.step()
    found = [swarm.step() for _ in range(STEPS)]
    whole = median(step.seconds for step in found) + between_s
    middle = min(found, key=lambda step: abs(step.seconds + between_s - whole))
    return Estimate(
        seconds=whole,
        between_s=between_s,
        computing={peer: busy / whole for peer, busy in middle.computing.items()},
        sending={peer: busy / whole for peer, busy in middle.sending.items()},
    )
