"""Lines are measured before a move relies on them. Pure except for what `search` and `ask` do.

A search takes a line that nobody measured to be as fast as its estimate may be. If the best arrangement needs
such lines, volunteers are asked to measure them, and it is searched anew (lazy evaluation of the edges of a
shortest path: Dellin and Srinivasa, ICAPS 2016). So no line is measured that the best plan does not need,
and none is taken for fast that is not. Docs: planning.md, "Asked before moved".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise

from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.dht.discovery import Advert
from hetpeer.peer.planning.advert_lines import may_carry_more

Line = tuple[str, str]
"""Two peers, the smaller id first: the lines between them in both directions."""
TIMES = 8
"""Times that volunteers are asked for one arrangement."""
MOST = 24
"""Lines that are asked for at a time."""
HOPES = (1.0, 2.0, 4.0)
"""Errors by which a line may be faster than its estimate: at first, and as long as nothing is found."""


@dataclass(frozen=True, slots=True)
class Hope:
    """How fast lines may be that nobody measured."""

    errors: float
    """Errors of their estimates by which they may be faster."""
    in_vain: Collection[Line]
    """Lines that cannot be measured: no hope for them."""


def line_of(one: str, other: str) -> Line:
    """The line between two peers."""
    return min(one, other), max(one, other)


def lines_needed(arrangement: Arrangement) -> set[Line]:
    """Lines on which its steps send: along pipelines, and between those that hold the same blocks."""
    working = {seat: peer for peer, seat in arrangement.seats.items() if peer not in arrangement.backups}
    needed = {
        line_of(working[cluster, here], working[cluster, there])
        for cluster, layout in enumerate(arrangement.layouts)
        for here, there in pairwise(layout)
        if (cluster, here) in working and (cluster, there) in working
    }
    for (seat, peer), (other_seat, other) in combinations(working.items(), 2):
        (begin, end), (other_begin, other_end) = seat[1], other_seat[1]
        if max(begin, other_begin) < min(end, other_end):
            needed.add(line_of(peer, other))
    return needed


def lines_known(adverts: Mapping[str, Advert]) -> set[Line]:
    """Lines that are measured in both directions, by bundles long enough to show them."""
    notes = {
        (peer, note.to)
        for peer, advert in adverts.items()
        for note in advert.links
        if note.rate and not may_carry_more(note)
    }
    return {
        line_of(one, other)
        for one, other in combinations(adverts, 2)
        if (one, other[-8:]) in notes and (other, one[-8:]) in notes
    }


def turns(lines: Iterable[Line]) -> list[list[Line]]:
    """The lines in turns, so that no peer has two of them in one turn.

    turns([("a", "b"), ("b", "c"), ("c", "d")])  # [[("a", "b"), ("c", "d")], [("b", "c")]]
    """
    found: list[list[Line]] = []
    for line in lines:
        free = (turn for turn in found if not any(set(line) & set(other) for other in turn))
        turn = next(free, None)
        if turn is None:
            found.append([line])
        else:
            turn.append(line)
    return found


async def settled(
    search: Callable[[Hope | None], Awaitable[Arrangement | None]],
    known: Callable[[], Collection[Line]],
    ask: Callable[[Collection[Line]], Awaitable[Collection[Line]]],
    in_vain: set[Line],
) -> Arrangement | None:
    """The best arrangement all of whose lines are measured, as far as they can be; None if there is none.

    `search` finds the best one, with as much hope as it is told (None: none). `known`: the measured lines.
    `ask` has lines measured, and returns those that are known then. The others are added to `in_vain`: they
    count as estimated from then on, less by the error. If nothing is found, more is hoped for.
    """
    left = TIMES
    for errors in HOPES:
        while (found := await search(Hope(errors, in_vain))) is not None:
            lines = sorted(lines_needed(found) - set(known()) - in_vain)[:MOST]
            if not lines:
                return found
            if not left:
                return await search(None)
            left -= 1
            in_vain |= set(lines) - set(await ask(lines))
    return None
