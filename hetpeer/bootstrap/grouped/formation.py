"""The division of waiting volunteers into clusters: a planner's proposal, and how long founding waits for it.

Pure. See docs/grouped.md, "Formation of clusters".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.state.membership import is_cut

MOVES_VERSION = 5
"""Wire version of volunteers that a `Granted` takes to another cluster."""
LONGEST = 3
"""A complete cluster waits for so many quiet times at most, however many volunteers come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """A proposal for all volunteers that wait for a cluster to be founded."""

    clusters: Sequence[Sequence[tuple[str, Range]]]
    """Peers of each cluster with their blocks, which together are all blocks of the model in order."""
    spared: frozenset[str] = frozenset()
    """Volunteers that are to look for another place."""

    def fault(self, blocks: int) -> str | None:
        """Reason why the clusters do not fit a model of `blocks` blocks; None if they fit."""
        if not self.clusters:
            return "nobody is in a cluster"
        for number, seats in enumerate(self.clusters):
            if not is_cut([place for _, place in seats], blocks):
                return f"cluster {number} of the formation is not cut into {blocks} blocks"
        peers = [peer for seats in self.clusters for peer, _ in seats]
        if len(set(peers)) < len(peers) or self.spared.intersection(peers):
            return "a volunteer has two places"
        return None

    @property
    def peers(self) -> frozenset[str]:
        """All volunteers that the formation was made for."""
        return frozenset(peer for seats in self.clusters for peer, _ in seats) | self.spared


class Gathering:
    """How long a run in which no cluster lives waits for more volunteers and for a formation.

    Times are seconds of the coordinator's clock.
    """

    def __init__(self, quiet_s: float) -> None:
        """`quiet_s`: seconds without anybody who comes or goes until clusters are founded as they are."""
        self._quiet_s = quiet_s
        self._here: frozenset[str] = frozenset()
        self._changed_at = 0.0
        self._complete_at: float | None = None
        """Time when a cluster was complete first."""
        self._formed: frozenset[str] = frozenset()
        """Volunteers that were divided last, spared ones included."""

    def form(self, peers: frozenset[str]) -> None:
        """Note that `peers` were divided: until others come, clusters are founded once they are complete."""
        self._formed = peers

    def awaits(self, peers: frozenset[str]) -> bool:
        """Whether a formation of the waiting `peers` is awaited."""
        return self._quiet_s > 0 and not peers <= self._formed

    def over(self, peers: frozenset[str], now: float, *, complete: bool) -> bool:
        """Note who waits, and whether with a `complete` cluster; returns whether it may be founded."""
        if peers != self._here:
            self._here, self._changed_at = peers, now
        if complete and self._complete_at is None:
            self._complete_at = now
        if not self.awaits(peers) or self._complete_at is None:
            return True
        latest = self._complete_at + LONGEST * self._quiet_s
        return now >= min(self._changed_at + self._quiet_s, latest)
