"""With whom links are kept beside the volunteers of a step: those with whom we average, and have averaged. Pure.

In a grouped run partners change from one averaging to the next. A new link takes several trips to open, and more until it is fast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hetpeer.averaging.messages import Range

KEPT = 16
"""With whom parameters were exchanged lately, ourselves among them: each has a part of our memory for what it sends."""


class LinkedPeers:
    """Those of one volunteer; iterated over, their peer ids."""

    def __init__(self) -> None:
        self._group: frozenset[str] = frozenset()
        """All who take part in what we averaged last, or average now."""
        self._met: dict[str, None] = {}
        """With whom we exchange parameters, the last ones last."""

    def averages(self, roster: Mapping[str, Range], place: Range | None) -> None:
        """We average with `roster`, and hold `place`: with those who hold some block of it parameters are exchanged."""
        self._group = frozenset(roster)
        begin, end = place or (0, 0)
        for peer, (first, last) in roster.items():
            if first < end and begin < last:
                self._met.pop(peer, None)
                self._met[peer] = None
        for peer in list(self._met)[:-KEPT]:
            del self._met[peer]

    def gone(self, peers: Collection[str]) -> None:
        """These have left."""
        self._group = self._group.difference(peers)
        self._met = {peer: None for peer in self._met if peer not in peers}

    def __iter__(self) -> Iterator[str]:
        return iter(self._group.union(self._met))
