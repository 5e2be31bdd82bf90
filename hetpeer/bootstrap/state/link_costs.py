"""Costs of links between holders: routes keep to fast links and to their cluster.

Pure. Planners put neighbours into one cluster (docs/planning.md), and know nothing of holders of the next
blocks in other clusters. A link out of the cluster that was not measured is taken to be as slow and as busy
as the mean of its sender's links. It is used where the load of the peers is uneven enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from hetpeer.stages.pipeline.routes import Route

SLIGHT = 0.5
"""Cost of leaving the cluster, in block times of the fastest peer: it decides only between equal routes."""


class LinkCosts:
    """Cost of each link for the next microbatch; it grows with the microbatches routed over it.

    `clusters`: peer → its cluster. `seconds`: measured link (from, to) → time of a microbatch, forward and
    back, in block times of the fastest peer. `leaving`: cost of leaving the cluster where nothing was
    measured. `mixed`: routes are to meet many others, whatever that costs.
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
        """Sender → how many of its links were measured, and the sum of their costs."""
        for (sender, _), took in self._seconds.items():
            self._dearer(sender, 1, took)

    def __call__(self, sender: str, to: str) -> float:
        """Cost of the next microbatch on the link from `sender` to `to`."""
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
        """Note that one more microbatch takes this route."""
        for one, other in pairwise(route):
            pair = (one.peer, other.peer)
            if (took := self._seconds.get(pair)) is not None:
                self._load[pair] = self._load.get(pair, 0.0) + took
                self._dearer(one.peer, 0, took)
