"""A cut for waiting volunteers for volunteers in a forming cluster, as a planner proposes it.

Pure (docs/averaging.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetpeer.bootstrap.state.membership import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCut:
    """A proposal for forming cluster `cluster`."""

    cluster: int
    seats: Sequence[tuple[str, Range]]
    """Peers with their blocks, which together are all blocks of the model in order."""
    spared: frozenset[str] = frozenset()
    """Volunteers of the cluster that are to look for another place."""

    def fault(self, blocks: int) -> str | None:
        """Why it does not fit a model of this many blocks; None if it does."""
        places = [place for _, place in self.seats]
        boundaries = [0, *(end for _, end in places)]
        rises = all(one < other for one, other in pairwise(boundaries))
        if not rises or places != list(pairwise(boundaries)) or boundaries[-1] != blocks:
            return f"cluster {self.cluster} is not cut into {blocks} blocks"
        peers = [peer for peer, _ in self.seats]
        if len(set(peers)) < len(peers) or self.spared.intersection(peers):
            return "a volunteer has two places"
        return None

    @property
    def peers(self) -> frozenset[str]:
        """All volunteers that it was made for."""
        return frozenset(peer for peer, _ in self.seats) | self.spared
