"""Which open places serve the run best with a newcomer there: by what a step would take, as for a plan that lives (stages/planning/swarms/current_step_time.py).

Pure. What volunteers say of themselves guides this and decides nothing else: who lies about its speed gets a place where the run is slower.
Of machines and lines of which nothing is known the middle of what is known is taken. Blocks that nobody holds are given to such a middle machine for the time being, so that
places can be compared while some are still missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from statistics import median

import numpy as np
from numpy.typing import NDArray

from hetpeer.averaging.messages import Place
from hetpeer.bootstrap.state.membership import Membership, Range
from hetpeer.bootstrap.state.volunteer import Volunteer
from hetpeer.stages.planning.swarms.current_step_time import as_it_is, busy_s, holders_at
from hetpeer.stages.planning.swarms.plan_inputs import LATENCY_S, LINE, Devices, StepDemand

SAME = 0.05
"""Steps that differ by no more than this part of the shorter one are equally long."""
MORE = 1.25
"""A place is helped more than another if it is so many times as much: speeds of equal machines are measured as differently."""
FLOPS, RATES = (1e6, 1e18), (125.0, 125e9)
"""FLOP/s and bytes/s that are believed: nobody's claim is to be the end of the arithmetic."""
MOST = 64
"""Of more volunteers places are not compared: it would take the coordinator too long, and one more changes little."""


def ranked(members: Membership, newcomer: Volunteer, asks: StepDemand | None) -> tuple[Place, ...]:
    """The places of `members`. With rank 0 are those which `newcomer` had better take, 1 the others: a step is no more than `SAME` longer with it there than where it
    is shortest, and its help is needed there as much as anywhere. All have rank 0 where nothing can be said.
    """
    places = members.places()
    others = [
        v for _, v in sorted(members.volunteers.items()) if v.place and not v.slow and v is not newcomer
    ]
    if asks is None or not newcomer.flops_per_second or not 0 < len(others) <= MOST:
        return places
    room = newcomer.memory_bytes or math.inf
    fitting = [place for place in places if place.open and place.memory_bytes <= room]
    if any(not place.holders for place in fitting):
        fitting = [place for place in fitting if not place.holders]
    ranges = list(dict.fromkeys((place.begin, place.end) for place in fitting))
    if len(ranges) < 2 or not any(v.flops_per_second or v.computing for v in others):
        return places
    best = _best(_Swarm(others, newcomer, asks, [(p.begin, p.end) for p in places if p.open]), ranges)
    return tuple(
        place.model_copy(update={"rank": 0 if (place.begin, place.end) in best else 1}) for place in places
    )


def _best(swarm: _Swarm, ranges: Sequence[Range]) -> set[Range]:
    """Those of `ranges` that have rank 0."""
    step_s = {place: swarm.step_s(place) for place in ranges}
    shortest = min(step_s.values())
    good = [place for place in ranges if step_s[place] <= (1.0 + SAME) * shortest]
    helped = {place: swarm.helped_s(place) for place in good}
    most = max(helped.values())
    return {place for place in good if MORE * helped[place] >= most}


class _Swarm:
    """`others` at their places, and `newcomer`, who may come to one of the ranges `open_`. Devices are in this order: the others, the newcomer, and one like the middle of them for
    each open range, in case that nobody holds it.
    """

    def __init__(
        self, others: Sequence[Volunteer], newcomer: Volunteer, asks: StepDemand, open_: Sequence[Range]
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
        """Microbatches a second that the holders of each block do."""

    def step_s(self, place: Range) -> float:
        """Of a step with the newcomer at `place`, and somebody like the middle machine wherever blocks are missing even then."""
        held = self._with(place)
        return as_it_is(self._devices.some(range(len(held))), self._asks, held)

    def helped_s(self, place: Range) -> float:
        """Seconds by which those who hold the blocks of `place` are done sooner with a step's microbatches; infinite where nobody holds some."""
        rate = min(self._rates[slice(*place)])
        if not rate:
            return math.inf
        held = self._with(place)
        own_s = busy_s(self._devices, self._asks, held, holders_at(held, len(self._asks)), len(self._held))
        return self._asks.microbatches * (1.0 / rate - 1.0 / (rate + 1.0 / own_s))

    def _with(self, place: Range) -> list[Range]:
        """What each device holds then."""
        held = [*self._held, place]
        covered = set(chain.from_iterable(range(*blocks) for blocks in held))
        for begin, end in self._open:
            if not covered.issuperset(range(begin, end)):
                covered.update(range(begin, end))
                held.append((begin, end))
        return held


def _devices(volunteers: Sequence[Volunteer], asks: StepDemand, more: int) -> Devices:
    """What is known of each volunteer; and so many `more` machines, each like the middle one."""
    count = len(volunteers) + more
    measured = _lines(volunteers, asks)
    said = [
        max(_believed(v.uplink, RATES), *row) for v, row in zip(volunteers, measured.tolist(), strict=True)
    ]
    up = np.array(_filled(said, more, LINE))
    down = np.maximum(up, np.append(measured.max(axis=0), np.zeros(more)))  # none is taken to be slower
    lines = np.minimum(up[:, None], down[None, :])
    lines[: len(volunteers), : len(volunteers)] = np.where(
        measured > 0, measured, lines[: len(volunteers), : len(volunteers)]
    )
    return Devices(
        flops=np.array(_filled(_flops(volunteers, asks), more, 1.0)),
        memory=np.zeros(count),  # who fits where is known already
        uplink=up,
        latency=np.full((count, count), LATENCY_S) * ~np.eye(count, dtype=np.bool_),
        bandwidth=lines,
    )


def _filled(amounts: Sequence[float], more: int, else_: float) -> list[float]:
    """The middle of those that are known, in place of the others and for so many `more`; `else_` if none is."""
    known = [amount for amount in amounts if amount]
    middle = median(known) if known else else_
    return [*(amount or middle for amount in amounts), *[middle] * more]


def _flops(volunteers: Sequence[Volunteer], asks: StepDemand) -> list[float]:
    """FLOP/s that each reaches: in training if it has trained, else on the blocks of its place, which it has rehearsed. Who has had none yet, and only multiplied matrices, falls
    behind that as far as the others do.
    """
    reached = [_believed(_trained(v, asks) or v.flops_per_second, FLOPS) for v in volunteers]
    products = [_believed(v.product_flops, FLOPS) for v in volunteers]
    both = list(zip(reached, products, strict=True))
    tried = [flops / product for flops, product in both if product and flops not in (0.0, product)]
    share = median(tried) if tried else 1.0
    return [_believed(flops * share, FLOPS) if flops == product else flops for flops, product in both]


def _trained(volunteer: Volunteer, asks: StepDemand) -> float:
    flops = float(asks.flops[slice(*(volunteer.place or (0, 0)))].sum())
    return asks.computed * flops / volunteer.computing if volunteer.computing else 0.0


def _lines(volunteers: Sequence[Volunteer], asks: StepDemand) -> NDArray[np.float64]:
    """Bytes/s from row to column; 0 where nothing was measured."""
    number = {volunteer.peer: n for n, volunteer in enumerate(volunteers)}
    rates = np.zeros((len(volunteers), len(volunteers)))
    for volunteer in volunteers:
        for peer, seconds in volunteer.links.items():
            if volunteer.place and peer in number and seconds:
                begin, end = volunteer.place
                there = volunteers[number[peer]].place or (0, 0)
                border = end if there[0] <= end < there[1] else begin
                rate = _believed(float(asks.crossing[border]) / seconds, RATES)
                rates[number[volunteer.peer], number[peer]] = rate
    return rates


def _believed(amount: float, bounds: tuple[float, float]) -> float:
    """0 is: not known."""
    least, most = bounds
    return min(max(amount, least), most) if amount else 0.0
