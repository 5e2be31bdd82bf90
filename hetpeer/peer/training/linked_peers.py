"""Peers to keep links to, besides the volunteers of a step: those that we average with, or did lately. Pure.

In a grouped run partners change from one averaging to the next. A new link takes several round trips to open,
and more until it is fast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hetpeer.averaging.messages import Range

KEPT = 16
"""Peers that parameters were exchanged with lately, ourselves included: each has a part of our memory for its
tensors.
"""


class LinkedPeers:
    """The linked peers of one volunteer; iterates over their peer ids."""

    def __init__(self) -> None:
        self._group: frozenset[str] = frozenset()
        """All who take part in what we averaged last, or average now."""
        self._met: dict[str, None] = {}
        """Peers that we exchange parameters with, the latest ones last."""

    def averages(self, roster: Mapping[str, Range], place: Range | None) -> None:
        """We average with `roster` and hold `place`: parameters are exchanged with all that hold a block of
        it.
        """
        self._group = frozenset(roster)
        begin, end = place or (0, 0)
        for peer, (first, last) in roster.items():
            if first < end and begin < last:
                self._met.pop(peer, None)
                self._met[peer] = None
        for peer in list(self._met)[:-KEPT]:
            del self._met[peer]

    def forget(self, peers: Collection[str]) -> None:
        """Forget `peers`, which have left."""
        self._group = self._group.difference(peers)
        self._met = {peer: None for peer in self._met if peer not in peers}

    def __iter__(self) -> Iterator[str]:
        return iter(self._group.union(self._met))
