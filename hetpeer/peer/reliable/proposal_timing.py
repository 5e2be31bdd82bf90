"""Timing of the search for better places. Pure; times are seconds of a clock that only rises."""

from __future__ import annotations

from collections.abc import Callable

from hetpeer.peer.planning.replan import Seating

SETTLED_S = 30.0
"""Seconds without a newcomer or loss before a search, and before a block without a holder is given away."""
LONGEST_S = 120.0
"""Seconds after the first of several changes in which a search takes place, however often things change."""
AGAIN_S = 120.0
"""Seconds without another change after a change, unless a volunteer comes or leaves. They double with each
change: a gain hoped for from links that nobody had measured may not have come true.
"""
DOUBLINGS = 10


class ProposalTiming:
    """When to look for better places, by who is where."""

    def __init__(self) -> None:
        self._seating: Seating | None = None
        self._not_before = 0.0
        self._changed_at: float | None = None
        """Time of the first change since the last search."""
        self._rested_at = 0.0
        self.since = 0
        """Step under way when the seating changed first since the last search; later ones are measured."""
        self.changes = 0
        """Proposals since the last volunteer came or went."""
        self._whole: frozenset[int] = frozenset()
        """Clusters that were complete at some time since volunteers were moved last."""
        self.lost: frozenset[int] = frozenset()
        """Complete clusters that a volunteer has left since the last proposal."""

    def proposed(self, now: float) -> None:
        """Note a proposal at `now`: the next one waits longer."""
        self.lost = frozenset()
        self._rested_at = now + AGAIN_S * 2.0 ** min(self.changes, DOUBLINGS)
        self.changes += 1

    def is_due(
        self,
        seating: Seating,
        now: float,
        done: int = 0,
        known: Callable[[int], bool] = lambda _since: True,
    ) -> bool:
        """Note the present `seating` after `done` steps. Returns whether to search for a better one now.

        A search waits until `known(since)`: enough steps after `since` were measured.
        """
        if seating != self._seating:
            self.since = done if self._changed_at is None else self.since
            before = seating if self._seating is None else self._seating
            gone = before.seats.keys() - seating.seats.keys()
            self.lost |= self._whole & {before.seats[peer][0] for peer in gone}
            if any(before.seats.get(peer, seat) != seat for peer, seat in seating.seats.items()):
                self._whole = frozenset()
            self._whole |= seating.whole
            if self._seating is None or before.seats.keys() != seating.seats.keys():
                self._rested_at, self.changes = 0.0, 0
            self._changed_at = now if self._changed_at is None else self._changed_at
            settled_at = min(now + SETTLED_S, self._changed_at + LONGEST_S)
            self._seating, self._not_before = seating, max(settled_at, self._rested_at)
        if now < self._not_before or not known(self.since):
            return False
        self._changed_at = None
        self._not_before = now + AGAIN_S
        return True
