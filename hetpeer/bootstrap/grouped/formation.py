"""The division of waiting volunteers into clusters: a planner's proposal, and how long founding waits for it.

Pure. See docs/grouped.md, "Formation of clusters".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.state.membership import is_cut

MOVES_VERSION = 5
"""Wire version of volunteers that a `Granted` takes to another cluster."""
GAPS = 3
"""Gaps between arrivals from which the next arrival is foreseen: the last ones."""
APART = 2.0
"""Somebody who comes within so many times the longest of these gaps is waited for."""
PATIENCE = 3
"""Nobody is foreseen for more than so many quiet times."""
LONGEST = 4
"""A complete cluster waits for so many quiet times at most, or times within which somebody is foreseen."""


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

    Volunteers that were not divided wait until nobody has come or gone for the quiet time. If several wait,
    and the last of them came at intervals, all wait for the next one for about as long as those were. They
    also wait for volunteers that are known to be on their way. One that is alone, with nobody on the way,
    waits for a formation only. Times are seconds of the coordinator's clock.

    gathering = Gathering(quiet_s=10.0)
    gathering.over(frozenset({"ada"}), now=0.0, complete=True)  # False: ada has not been divided
    """

    def __init__(self, quiet_s: float) -> None:
        """`quiet_s`: seconds without anybody who comes or goes until clusters are founded as they are; 0: at
        once, and nobody is waited for.
        """
        self._quiet_s = quiet_s
        self._here: frozenset[str] = frozenset()
        self._changed_at = 0.0
        self._came: frozenset[str] = frozenset()
        """All volunteers that have waited here; who comes back is no arrival."""
        self._arrivals: deque[float] = deque(maxlen=GAPS + 1)
        """Times of the last arrivals."""
        self._coming: frozenset[str] = frozenset()
        """Volunteers on their way."""
        self._complete_at: float | None = None
        """Time when a cluster was complete first."""
        self._formed: frozenset[str] = frozenset()
        """Volunteers that were divided last, spared ones included."""

    def form(self, peers: frozenset[str]) -> None:
        """Note that `peers` were divided: until others come, no other formation is awaited."""
        self._formed = peers

    def expect(self, peers: Collection[str]) -> None:
        """Note who is on the way: has said so, and has no place yet. Those who wait already do not count."""
        self._coming = frozenset(peers)

    def awaits(self, peers: frozenset[str]) -> bool:
        """Whether a formation of the waiting `peers` is awaited."""
        return self._quiet_s > 0 and not peers <= self._formed

    def over(self, peers: frozenset[str], now: float, *, complete: bool) -> bool:
        """Note who waits, and whether with a `complete` cluster; returns whether it may be founded."""
        if peers != self._here:
            self._here, self._changed_at = peers, now
        if peers - self._came:
            self._came |= peers
            self._arrivals.append(now)
        if complete and self._complete_at is None:
            self._complete_at = now
        if self._complete_at is None or not self._quiet_s:
            return True
        return now >= min(self._quiet_at, self._complete_at + LONGEST * max(self._quiet_s, self._foreseen_s))

    @property
    def _quiet_at(self) -> float:
        """Time from which nobody else is waited for."""
        if self._coming - self._here:
            return math.inf
        foreseen_at = self._arrivals[-1] + self._foreseen_s if self._arrivals else 0.0
        undivided = self._changed_at + self._quiet_s if self.awaits(self._here) else 0.0
        return max(foreseen_at, undivided)

    @property
    def _foreseen_s(self) -> float:
        """Seconds after the last arrival within which another one is foreseen; 0: none is."""
        gaps = [after - before for before, after in pairwise(self._arrivals)]
        longest, limit = max(gaps, default=0.0), PATIENCE * self._quiet_s
        return min(APART * longest, limit) if len(self._here) > 1 and longest <= limit else 0.0
