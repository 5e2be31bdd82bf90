"""Targets of links: seconds that each may take for a microbatch, for the least time to a loss. Pure.

A link should take no longer than the time between two microbatches of its sender, which is longer for a slow
holder. To shrink all links until they do takes less time, but what is left out costs tokens: a model needs
more of them for the same loss (stages/links/token_prices.py). The largest ratio is the one with which

    seconds of a microbatch at the slowest block * tokens to the same loss

is least. It is never above the author's, and never more than is needed to keep up with the computation.

All rests on volunteers' claims, as in work_shares.py: a false one slows the run, and changes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.stages.links.token_prices import log_price
from hetpeer.stages.planning.swarms.plan_inputs import Compression

MOST = 100.0
"""No need is taken to be less than the median over this."""
RATIOS = 32
"""Ratios that are compared."""
BETTER = 0.97
"""The ratio changes if the time to a loss is at most this part of what it is: lines are measured with noise.
"""


def link_targets(
    ready: Collection[VolunteerState], most: float, limited: Collection[str] = ()
) -> dict[str, float]:
    """Peer → most seconds that each of its links may take for a microbatch; empty where no link is known.

    `most`: no link is shrunk further. `limited`: peers that get next to nothing and do not count.

    A holder needs the time of its computing, or of its link at `most` if that is longer (R / r of FusionLLM's
    Eq. 7). Holders of a block share its microbatches by that, and the slowest block sets the number of
    microbatches. With one holder for each block all links get the same target: the slowest link at `most`, or
    the slowest computation. No target is longer than the longest need.
    """
    pace = _pace(_holders(ready), most, limited)
    return {} if pace is None else pace.targets


class RatioChoice:
    """The largest ratio of a run's links, step after step."""

    def __init__(self) -> None:
        self.ratio = 0.0
        """The ratio of the last step; 0: nothing was known."""

    def targets(
        self,
        ready: Collection[VolunteerState],
        most: float,
        compression: Compression,
        limited: Collection[str] = (),
    ) -> dict[str, float]:
        """`link_targets` with the ratio that pays, or with `most` if links do not adapt.

        No ratio is above what the run's codecs reach, by `compression`.
        """
        if compression.adaptive:
            reachable = max(compression.forward, compression.backward)
            most = self.choose(ready, min(most, reachable), limited)
        return link_targets(ready, most, limited)

    def choose(self, ready: Collection[VolunteerState], most: float, limited: Collection[str] = ()) -> float:
        """The ratio, at most `most`, with the least time to a loss; `most` where no link is known."""
        holders = _holders(ready)
        slowest = max((max(one.sides) for one in holders), default=0.0)
        fastest = min((one.computing for one in holders if one.computing), default=0.0)
        if not slowest or not fastest:
            return most
        largest = min(most, max(slowest / fastest, 1.0))
        ratios = [largest ** (number / (RATIOS - 1)) for number in range(RATIOS)]
        times = {ratio: _time_to_loss(holders, ratio, limited) for ratio in ratios}
        best = min(ratios, key=lambda ratio: (times[ratio], ratio))
        now = min(self.ratio, most)
        if not now or times[best] <= BETTER * _time_to_loss(holders, now, limited):
            now = best
        self.ratio = now
        return now


@dataclass(frozen=True, slots=True)
class _Holder:
    """A volunteer with a place."""

    peer: str
    place: tuple[int, int]
    computing: float
    """Seconds of a microbatch; 0: unknown."""
    sides: tuple[float, float]
    """Seconds of its fastest link to a holder of the block before, and behind; 0: unknown."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """Result of one largest ratio."""

    targets: dict[str, float]
    needs: dict[str, float]
    rates: dict[int, float]
    """Block → microbatches per second."""


def _time_to_loss(holders: Sequence[_Holder], most: float, limited: Collection[str]) -> float:
    """Seconds of a microbatch in the long run, times the tokens to the same loss.

    A border's price is that of both directions, so each counts for half, by the part of the microbatches that
    pass this holder.
    """
    pace = _pace(holders, most, limited)
    assert pace is not None, "a link is known"
    price = 0.0
    for one in holders:
        target, (begin, end) = pace.targets[one.peer], one.place
        for seconds, block in zip(one.sides, (begin, end - 1), strict=True):
            part = min(1 / (pace.needs[one.peer] * pace.rates[block]), 1.0)
            price += 0.5 * part * log_price(min(max(seconds / target, 1.0), most))
    return math.exp(price) / min(pace.rates.values())


def _pace(holders: Sequence[_Holder], most: float, limited: Collection[str]) -> _Pace | None:
    """Targets, needs and rates if links are shrunk `most` times; None if no link is known."""
    usual = median([one.computing for one in holders if one.computing] or [0.0])
    needs = {one.peer: max(one.computing or usual, max(one.sides) / most) for one in holders}
    known = [seconds for seconds in needs.values() if seconds]
    if not known or not any(any(one.sides) for one in holders):
        return None
    needs = {peer: max(seconds or median(known), median(known) / MOST) for peer, seconds in needs.items()}
    places = {one.peer: one.place for one in holders}
    blocks = {block for place in places.values() for block in range(*place)}
    rates = _block_rates({peer: places[peer] for peer in places if peer not in limited}, needs)
    if rates.keys() != blocks:  # some block has no other holder
        rates = _block_rates(places, needs)
    slowest, longest = min(rates.values()), max(needs.values())
    targets = {
        peer: min(needs[peer] * min(rates[block] for block in range(*place)) / slowest, longest)
        for peer, place in places.items()
    }
    return _Pace(targets, needs, rates)


def _block_rates(places: Mapping[str, tuple[int, int]], needs: Mapping[str, float]) -> dict[int, float]:
    """Block → microbatches per second of its holders together."""
    rates: dict[int, float] = {}
    for peer, (begin, end) in places.items():
        for block in range(begin, end):
            rates[block] = rates.get(block, 0.0) + 1 / needs[peer]
    return rates


def _holders(ready: Collection[VolunteerState]) -> list[_Holder]:
    places = {one.peer: one.place for one in ready if one.place is not None}
    return [
        _Holder(one.peer, one.place, one.computing, _sides(one, one.place, places))
        for one in ready
        if one.place is not None
    ]


def _sides(
    one: VolunteerState, place: tuple[int, int], places: Mapping[str, tuple[int, int]]
) -> tuple[float, float]:
    """Seconds of an uncompressed microbatch on the fastest link to each side; 0: unknown."""
    found: list[list[float]] = [[], []]
    for peer, seconds in one.links.items():
        if seconds and peer in places:
            for side, block in zip(found, (place[0] - 1, place[1]), strict=True):
                if places[peer][0] <= block < places[peer][1]:
                    side.append(seconds)
    before, behind = (min(side, default=0.0) for side in found)
    return before, behind
