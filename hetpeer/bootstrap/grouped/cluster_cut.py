"""A cut of their own for volunteers who wait in a forming cluster: what a planner proposes. Pure. Docs: averaging.md, "A cut of their own"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetpeer.bootstrap.state.membership import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCut:
    """Of forming cluster `cluster`."""

    cluster: int
    seats: Sequence[tuple[str, Range]]
    """Peers with their blocks, from the first block to the last: all of the model."""
    spared: frozenset[str] = frozenset()
    """Who waits there, too, and is to look for another place."""

    def fault(self, blocks: int) -> str | None:
        """What is wrong with it for a model of so many blocks."""
        places = [place for _, place in self.seats]
        borders = [0, *(end for _, end in places)]
        rises = all(one < other for one, other in pairwise(borders))
        if not rises or places != list(pairwise(borders)) or borders[-1] != blocks:
            return f"cluster {self.cluster} is not cut into {blocks} blocks"
        peers = [peer for peer, _ in self.seats]
        if len(set(peers)) < len(peers) or self.spared.intersection(peers):
            return "a volunteer has two places"
        return None

    @property
    def peers(self) -> frozenset[str]:
        """For whom it was made."""
        return frozenset(peer for peer, _ in self.seats) | self.spared
