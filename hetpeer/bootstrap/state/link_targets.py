"""What each volunteer's links aim at, where the run has an adaptive codec. Pure. Docs: links.md, "How much".

A link is to take no longer than the microbatches that its sender does come one after the other. Of several holders of a block each does a part of them: whoever is
slow does few, and has time; its slowness is nothing to the others' links.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median

from hetpeer.bootstrap.state.volunteer import Volunteer
from hetpeer.bootstrap.state.volunteer_rates import MOST


def targets(ready: Collection[Volunteer], most: float, limited: Collection[str] = ()) -> dict[str, float]:
    """Peer → seconds that each of its links is to take for a microbatch at most; empty where no link is known. `most` is the author's ratio: a link is shrunk no further.

    A holder needs the time of its computing, or of its line where that takes longer at `most` (R / r of FusionLLM's Eq. 7); holders of a block share its microbatches by
    that, and the slowest block decides how many there are. With one holder for each block all links aim at the same: the slowest link at `most`, or the slowest computation; no link
    is to take longer than that in any case. Those that are `limited` do not count: they are given next to nothing, whatever they claim.
    """
    places = {v.peer: v.place for v in ready if v.place is not None}
    usual = median([v.computing for v in ready if v.computing] or [0.0])
    need = {v.peer: max(v.computing or usual, _line_s(v, ready) / most) for v in ready if v.peer in places}
    known = [seconds for seconds in need.values() if seconds]
    if not known or not any(any(v.links.values()) for v in ready):
        return {}
    need = {peer: max(seconds or median(known), median(known) / MOST) for peer, seconds in need.items()}
    blocks = {block for place in places.values() for block in range(*place)}
    rates = _rates({peer: places[peer] for peer in places if peer not in limited}, need)
    if rates.keys() != blocks:  # there is a block that nobody else has
        rates = _rates(places, need)
    slowest, longest = min(rates.values()), max(need.values())
    return {
        peer: min(need[peer] * min(rates[block] for block in range(*place)) / slowest, longest)
        for peer, place in places.items()
    }


def _rates(places: Mapping[str, tuple[int, int]], need: Mapping[str, float]) -> dict[int, float]:
    """Block → microbatches a second that its holders do together."""
    rates: dict[int, float] = {}
    for peer, (begin, end) in places.items():
        for block in range(begin, end):
            rates[block] = rates.get(block, 0.0) + 1 / need[peer]
    return rates


def _line_s(volunteer: Volunteer, ready: Collection[Volunteer]) -> float:
    """What its lines take for a microbatch that is not compressed, forward or back, where it may choose between several; 0: not known."""
    assert volunteer.place is not None
    begin, end = volunteer.place
    sides: list[list[float]] = [[], []]
    for other in ready:
        seconds = volunteer.links.get(other.peer, 0.0)
        if seconds and other.place is not None:
            for side, block in zip(sides, (begin - 1, end), strict=True):
                if other.place[0] <= block < other.place[1]:
                    side.append(seconds)
    return max((min(side) for side in sides if side), default=0.0)
