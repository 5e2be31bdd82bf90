"""Link targets: seconds that a volunteer's links may take for a microbatch, if the codec is adaptive
(docs/links.md).

Pure. A link should take no longer than the time between two microbatches of its sender. Holders of a block
share its microbatches. So a slow holder does few of them and has time for each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median

from hetpeer.bootstrap.state.volunteer import Volunteer
from hetpeer.bootstrap.state.volunteer_rates import MOST


def targets(ready: Collection[Volunteer], most: float, limited: Collection[str] = ()) -> dict[str, float]:
    """Peer → most seconds that each of its links may take for a microbatch; empty where no link is known.

    `most`: the author's largest ratio; no link is shrunk further. `limited`: peers that get next to nothing
    and do not count.

    A holder needs the time of its computing, or of its link at `most` if that is longer (R / r of FusionLLM's
    Eq. 7). Holders of a block share its microbatches by that, and the slowest block sets the number of
    microbatches. With one holder for each block all links get the same target: the slowest link at `most`, or
    the slowest computation. No target is longer than the longest need.
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
    if rates.keys() != blocks:  # some block has no other holder
        rates = _rates(places, need)
    slowest, longest = min(rates.values()), max(need.values())
    return {
        peer: min(need[peer] * min(rates[block] for block in range(*place)) / slowest, longest)
        for peer, place in places.items()
    }


def _rates(places: Mapping[str, tuple[int, int]], need: Mapping[str, float]) -> dict[int, float]:
    """Block → microbatches per second of its holders together."""
    rates: dict[int, float] = {}
    for peer, (begin, end) in places.items():
        for block in range(begin, end):
            rates[block] = rates.get(block, 0.0) + 1 / need[peer]
    return rates


def _line_s(volunteer: Volunteer, ready: Collection[Volunteer]) -> float:
    """Seconds of its links for an uncompressed microbatch, on the side where they are slower, over the
    fastest link there; 0: unknown.
    """
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
