"""Placement by the time of a step with the newcomer at a place.

Pure. It uses the step time estimate of live plans (stages/planning/swarms/current_step_time.py). It relies on
what volunteers claim and decides nothing else: one that lies about its speed gets a place where the run is
slower. Unknown machines count as the median of known ones, and unknown lines as they are estimated
(pair_lines.py). Blocks that nobody holds are given to such a median machine, so that places can be compared
while some are still missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from statistics import median

import numpy as np

from hetpeer.averaging.messages import Place, Range
from hetpeer.bootstrap.state.placement_policy import PlacementPolicy
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.stages.planning.pair_lines import LineEnd, MeasuredLine, Pair, pair_lines
from hetpeer.stages.planning.swarms.current_step_time import as_it_is, busy_s
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.swarm_plan import holders_at
from hetpeer.stages.planning.swarms.untried_speeds import on_blocks

SAME = 0.05
"""Steps whose times differ by no more than this share of the shorter count as equally long."""
MORE = 1.25
"""Ratio of gains from which a place needs help more: measurements of equal machines differ by as much."""
FLOPS = 1e6, 1e18
"""Range of believed FLOP/s: no claim may overflow the arithmetic."""
MOST = 64
"""Among more volunteers places are not ranked: it would take too long, and one more changes little."""


class StepTime(PlacementPolicy):
    """Rank 0 for the places that a newcomer had better take, 1 for the others.

    A place has rank 0 if a step is at most `SAME` longer with it there than at the best place, and its help
    is needed there as much as anywhere. All have rank 0 where nothing is known.
    """

    describe = "where a step is shortest"

    def ranks(
        self,
        places: Sequence[Place],
        newcomer: VolunteerState,
        others: Sequence[VolunteerState],
        demand: StepDemand,
    ) -> Sequence[int]:
        alike = [0] * len(places)
        if not newcomer.flops_per_second or not 0 < len(others) <= MOST:
            return alike
        fitting = [place for place in places if place.open and newcomer.has_room(place)]
        if any(not place.holders for place in fitting):
            fitting = [place for place in fitting if not place.holders]
        ranges = list(dict.fromkeys((place.begin, place.end) for place in fitting))
        if len(ranges) < 2 or not any(v.flops_per_second or v.computing for v in others):
            return alike
        best = _best(_Swarm(others, newcomer, demand, [(p.begin, p.end) for p in places if p.open]), ranges)
        return [0 if (place.begin, place.end) in best else 1 for place in places]


def makes_longer(
    places: Sequence[Place],
    newcomer: VolunteerState,
    others: Sequence[VolunteerState],
    demand: StepDemand,
    measured_s: float,
) -> bool:
    """Whether steps of the `others` get longer with `newcomer` at any of the `places`, by more than `SAME` of
    a step as it was measured and as it is modelled.

    False where a block has no holder, or little is known: then a newcomer is worth something.
    """
    if not newcomer.flops_per_second or not 0 < len(others) <= MOST:
        return False
    if not any(v.flops_per_second or v.computing for v in others):
        return False
    ranges = list(dict.fromkeys((place.begin, place.end) for place in places))
    held = [v.place for v in others if v.place is not None]
    if not ranges or not all(holders_at(held, len(demand))):
        return False
    swarm = _Swarm(others, newcomer, demand, ())
    before_s = swarm.step_s((0, 0))
    return min(map(swarm.step_s, ranges)) - before_s > SAME * max(before_s, measured_s)


def _best(swarm: _Swarm, ranges: Sequence[Range]) -> set[Range]:
    """The ranges with rank 0."""
    step_s = {place: swarm.step_s(place) for place in ranges}
    shortest = min(step_s.values())
    good = [place for place in ranges if step_s[place] <= (1.0 + SAME) * shortest]
    helped = {place: swarm.helped_s(place) for place in good}
    most = max(helped.values())
    return {place for place in good if MORE * helped[place] >= most}


class _Swarm:
    """The `others` at their places, and the `newcomer`, which may go to one of the ranges `open_`.

    Devices in order: the others, the newcomer, a median machine for each open range that nobody may hold.
    """

    def __init__(
        self,
        others: Sequence[VolunteerState],
        newcomer: VolunteerState,
        asks: StepDemand,
        open_: Sequence[Range],
    ) -> None:
        self._asks, self._open = asks, list(dict.fromkeys(open_))
        self._held = [v.place for v in others if v.place is not None]
        self._devices = _devices([*others, newcomer], asks, len(self._open))
        held = self._with((0, 0))
        holders = holders_at(held, len(asks))
        there = range(len(others))
        self._rates = [
            sum(1.0 / busy_s(self._devices, asks, held, holders, d) for d in some if d in there)
            for some in holders
        ]
        """Block → microbatches per second of its holders."""

    def step_s(self, place: Range) -> float:
        """Seconds of a step with the newcomer at `place`, and median machines at blocks still missing."""
        held = self._with(place)
        return as_it_is(self._devices.some(range(len(held))), self._asks, held)

    def helped_s(self, place: Range) -> float:
        """Seconds by which holders of `place`'s blocks finish a step sooner; infinite if a block has none."""
        rate = min(self._rates[slice(*place)])
        if not rate:
            return math.inf
        held = self._with(place)
        own_s = busy_s(self._devices, self._asks, held, holders_at(held, len(self._asks)), len(self._held))
        return self._asks.microbatches * (1.0 / rate - 1.0 / (rate + 1.0 / own_s))

    def _with(self, place: Range) -> list[Range]:
        """Block range of each device with the newcomer at `place`."""
        held = [*self._held, place]
        covered = set(chain.from_iterable(range(*blocks) for blocks in held))
        for begin, end in self._open:
            if not covered.issuperset(range(begin, end)):
                covered.update(range(begin, end))
                held.append((begin, end))
        return held


def _devices(volunteers: Sequence[VolunteerState], asks: StepDemand, more: int) -> Devices:
    """Devices of the volunteers, and `more` median machines, with lines as they are estimated."""
    count = len(volunteers) + more
    ends = [LineEnd(uplink=v.uplink, downlink=v.downlink, coordinate=v.coordinate) for v in volunteers]
    lines = pair_lines([*ends, *[LineEnd()] * more], _measured(volunteers, asks))
    return Devices(
        flops=np.array(_filled(_flops(volunteers, asks), more, 1.0)),
        memory=np.zeros(count),  # fitting was checked before
        uplink=lines.up,
        latency=lines.latency,
        bandwidth=lines.rate,
    )


def _filled(amounts: Sequence[float], more: int, else_: float) -> list[float]:
    """`amounts` with unknown ones (0) and `more` further ones as the median of the known, or else `else_`."""
    known = [amount for amount in amounts if amount]
    middle = median(known) if known else else_
    return [*(amount or middle for amount in amounts), *[middle] * more]


def _flops(volunteers: Sequence[VolunteerState], asks: StepDemand) -> list[float]:
    """FLOP/s of each volunteer: in training if it has trained, else in the rehearsal of its place, else as
    `on_blocks` expects.
    """
    reached = [_believed(_trained(v, asks) or v.flops_per_second, FLOPS) for v in volunteers]
    products = [_believed(v.product_flops, FLOPS) for v in volunteers]
    return [_believed(flops, FLOPS) for flops in on_blocks(reached, products)]


def _trained(volunteer: VolunteerState, asks: StepDemand) -> float:
    flops = float(asks.flops[slice(*(volunteer.place or (0, 0)))].sum())
    return asks.computed * flops / volunteer.computing if volunteer.computing else 0.0


def _measured(volunteers: Sequence[VolunteerState], asks: StepDemand) -> dict[Pair, MeasuredLine]:
    """(sender, receiver), by number → the rate of that line, as the sender says."""
    number = {volunteer.peer: n for n, volunteer in enumerate(volunteers)}
    found = {}
    for sender, volunteer in enumerate(volunteers):
        for peer, seconds in volunteer.links.items():
            if volunteer.place and peer in number and peer != volunteer.peer and seconds:
                begin, end = volunteer.place
                there = volunteers[number[peer]].place or (0, 0)
                boundary = end if there[0] <= end < there[1] else begin
                rate = float(asks.crossing[boundary]) / seconds
                if rate:
                    found[sender, number[peer]] = MeasuredLine(rate=rate)
    return found


def _believed(amount: float, bounds: tuple[float, float]) -> float:
    """`amount` within `bounds`; 0 (unknown) stays 0."""
    least, most = bounds
    return min(max(amount, least), most) if amount else 0.0
