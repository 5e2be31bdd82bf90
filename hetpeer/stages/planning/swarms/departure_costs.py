"""Cost of departures: seconds of a step, departures included, and roll-backs and leftovers an hour. Pure.

Each device leaves at random, so many times a second, and is away for a while (an alternating renewal
process). If others hold its blocks, they do its part of a step again (leftovers), and its share of all that
is done while it is away. So a fraction f of the time is lost, and a step takes T / (1 - f). If no other
holder is there, the run waits for a holder, which fetches a copy, and begins again at the last checkpoint.
The time of K steps from one checkpoint to the next is then that of Daly (Future Generation Computer Systems
22, 2006, Eq. 20) with mean time 1 / L between roll-backs and recovery R:

    exp(L R) (exp(L S) - 1) / L

where S = K T / (1 - f) is the time without roll-backs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand

HOUR_S = 3600.0
LARGEST = 300.0
"""Largest exponent: beyond it a run never gets to its next checkpoint."""
LEAST = 1e-3
"""Least part of the time that is not lost."""


@dataclass(frozen=True, slots=True)
class HeldPlace:
    """A device with the blocks [begin, end), and its part of a step's microbatches, 0…1."""

    device: int
    begin: int
    end: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DepartureCosts:
    """Expected cost of departures."""

    step_s: float
    """Seconds from step to step, departures included."""
    rollbacks: float
    """Departures an hour that leave a block without a holder."""
    leftovers: float
    """Microbatches an hour that others do again, at the blocks of a holder that left."""


def departure_costs(
    devices: Devices, work: StepDemand, places: Sequence[HeldPlace], step_s: float
) -> DepartureCosts | None:
    """Costs if devices hold `places` and a step by itself takes `step_s`; None if nobody says how often it
    leaves, or if pipelines train batches of their own.

    A device that leaves misses its other holders with the probability that all of them are away, for the
    block where that is largest.
    """
    departures = devices.departures
    if departures is None or work.averaging is not None or not math.isfinite(step_s):
        return None
    away = departures.away
    missing = np.ones(len(work))
    """Probability that no holder of a block is there, (B,)."""
    for place in places:
        missing[place.begin : place.end] *= away[place.device]
    leftovers = rollbacks = recovery_s = 0.0
    lost = 0.0
    """Fraction of the time that goes to leftovers and absence."""
    for place in places:
        one = place.device
        if place.begin == place.end or not departures.rate[one]:
            continue
        alone = float(missing[place.begin : place.end].max()) / float(away[one])
        leaves = float(departures.rate[one] * (1.0 - away[one]))
        leftovers += leaves * (1.0 - alone) * place.share * work.microbatches
        lost += leaves * (1.0 - alone) * place.share * (step_s + departures.away_s)
        fetching_s = float(work.state[place.begin : place.end].sum() / devices.uplink[one])
        rollbacks += leaves * alone
        recovery_s += leaves * alone * (departures.away_s + fetching_s)
    expected_s = step_s * max(1.0, lost) / max(1.0 - lost, LEAST)  # beyond 1 less is still better than more
    if rollbacks > 0.0:
        span_s = work.checkpoint_every * expected_s
        recovered = math.exp(min(recovery_s, LARGEST))  # L R, as R is the mean of all roll-backs
        repeated_s = math.expm1(min(rollbacks * span_s, LARGEST)) / rollbacks
        expected_s = recovered * repeated_s / work.checkpoint_every
    return DepartureCosts(step_s=expected_s, rollbacks=HOUR_S * rollbacks, leftovers=HOUR_S * leftovers)


def added_s(devices: Devices, work: StepDemand, held: Sequence[tuple[int, int]], step_s: float) -> float:
    """Seconds that departures add to a step of `step_s` if device d holds the blocks `held[d]`; 0: unknown.

    The holders of a block are taken to do equal parts of it.
    """
    holders = np.zeros(len(work))
    for begin, end in held:
        holders[begin:end] += 1.0
    places = [
        HeldPlace(device, begin, end, 1.0 / float(holders[begin:end].max()))
        for device, (begin, end) in enumerate(held)
        if begin < end
    ]
    costs = departure_costs(devices, work, places, step_s)
    return 0.0 if costs is None else costs.step_s - step_s
