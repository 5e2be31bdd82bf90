"""What it costs a microbatch to go from one holder to another, as far as that is known: routes keep to lines that are fast, and to their cluster. Pure.

Planners put next to each other in a cluster who is near each other (docs/planning.md). Whom holders of the next blocks in another cluster are, they did not ask:
such a line is taken to be no faster, and no less busy, than those that its sender has used, and is used where the load of the peers is uneven enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from hetpeer.stages.pipeline.routes import Route

SLIGHT = 0.5
"""To leave one's cluster, in the time of a block at the fastest peer: as much as nothing, but not where all else is equal."""


class LinkCosts:
    """`clusters`: peer → its cluster; `seconds`: (from, to) → of a microbatch, there and back, in the time of a block at the fastest peer, where it was measured. `leaving`: the price of
    leaving one's cluster where it was not. `mixed`: routes are to lead to many others now and then, whatever that costs.

    Remembers what was routed over each line: a line is busy as a peer is.
    """

    def __init__(
        self,
        clusters: Mapping[str, int] | None = None,
        seconds: Mapping[tuple[str, str], float] | None = None,
        leaving: float = SLIGHT,
        *,
        mixed: bool = False,
    ) -> None:
        self.mixed = mixed
        self._leaving = leaving
        self._clusters = dict(clusters or {})
        self._seconds = dict(seconds or {})
        self._load: dict[tuple[str, str], float] = {}
        self._known: dict[str, tuple[int, float]] = {}
        """Sender → of how many of its lines something is known, and the sum of their prices."""
        for (sender, _), took in self._seconds.items():
            self._dearer(sender, 1, took)

    def __call__(self, sender: str, to: str) -> float:
        """The price of the next microbatch that goes there."""
        if (sender, to) in self._seconds:
            return self._price(sender, to)
        if self._clusters.get(sender) == self._clusters.get(to):
            return 0.0
        lines, price = self._known.get(sender, (1, 0.0))
        return self._leaving + price / lines

    def _price(self, sender: str, to: str) -> float:
        return self._load.get((sender, to), 0.0) + self._seconds[sender, to]

    def _dearer(self, sender: str, lines: int, price: float) -> None:
        known, before = self._known.get(sender, (0, 0.0))
        self._known[sender] = known + lines, before + price

    def used(self, route: Route) -> None:
        """One more microbatch goes this way."""
        for one, other in pairwise(route):
            pair = (one.peer, other.peer)
            if (took := self._seconds.get(pair)) is not None:
                self._load[pair] = self._load.get(pair, 0.0) + took
                self._dearer(one.peer, 0, took)
