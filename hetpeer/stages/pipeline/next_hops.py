"""Where a holder's outputs go: who holds what, as far as we know it, whom our links reach, and what is left over.

Pure. Liveness only: a way is a proposal, any holder of a block may do any of its tasks, and what counts is decided by the
exact cover. An output that no holder whom we know and reach can take is left over, until somebody joins or comes back.
"""

from __future__ import annotations

from collections.abc import Collection

from hetpeer.stages.pipeline.effects import TaskKey
from hetpeer.stages.pipeline.routes import Hop, Roster, Route, blocks_left, splice, stands


class Onward:
    """One step's ways on, at one holder. `roster`: the active holders as the step begins."""

    def __init__(self, roster: Roster) -> None:
        self._roster = dict(roster)
        self._avoid: set[str] = set()
        """Peers that our links do not reach."""
        self._congested: dict[str, int] = {}
        """Peer → number of blocks left to the loss from which on its link takes no more."""
        self._resent: dict[str, float] = {}
        """Peer → how much it was given in place of others."""
        self._left: set[TaskKey] = set()

    def gone(self, peer: str) -> None:
        """`peer` left the roster."""
        self._roster.pop(peer, None)

    def joined(self, peer: str, place: tuple[int, int]) -> None:
        """`peer` holds the blocks `place`, and can be reached."""
        self._roster.setdefault(peer, place)
        self._avoid.discard(peer)

    def unreachable(self, peer: str) -> None:
        """Our link to `peer` is down."""
        self._avoid.add(peer)

    def knows(self, hop: Hop) -> bool:
        """Whether its peer is in the step and holds these blocks."""
        return stands(hop, self._roster)

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        self._avoid.discard(peer)

    def congested(self, peer: str, blocks: int) -> None:
        """The link to `peer` keeps no pace with what has `blocks` or more left to the loss."""
        self._congested[peer] = blocks

    def relieved(self, peer: str) -> None:
        """The link to `peer` takes everything again."""
        self._congested.pop(peer, None)

    def is_congested(self, peer: str) -> bool:
        """Whether its link holds anything up."""
        return peer in self._congested

    def may_leave(self, after: Route) -> bool:
        """Whether a forward may be begun whose output goes over `after`, as far as links are concerned."""
        if not after or after[0].peer in self._avoid or after[0].peer not in self._roster:
            return True  # it ends here, or goes another way
        held = self._congested.get(after[0].peer)
        return held is None or blocks_left(after) < held

    def way(self, key: TaskKey, after: Route) -> Route | None:
        """How the output of `key`, which was to go over `after`, goes on: around peers that are gone or cannot be reached.

        None if nobody whom we know holds its blocks, or it was to go nowhere. Where only our link does not reach them, the way is still given (it is
        taken as soon as the link is up), and the output is left over as well.
        """
        if not after:
            return None  # no honest route ends before the loss
        standing = {peer: held for peer, held in self._roster.items() if peer not in self._avoid}
        if not all(stands(hop, standing) for hop in after):
            cost = {peer: 1.0 + given for peer, given in self._resent.items()}
            found = splice(after, standing, cost)
            if not stands(found[0], standing):
                found = splice(after, self._roster, cost)
            for hop in set(found) - set(after):
                self._resent[hop.peer] = self._resent.get(hop.peer, 0.0) + 1.0
            after = found
        if stands(after[0], standing):
            self._left.discard(key)
        else:
            self._left.add(key)
        return after if stands(after[0], self._roster) else None

    def done(self, key: TaskKey) -> None:
        """The output of `key` has come to somebody who took it."""
        self._left.discard(key)

    def left_over(self, known: Collection[TaskKey]) -> list[TaskKey]:
        """Outputs for which nobody was found, of those that are still `known`."""
        self._left.intersection_update(known)
        return sorted(self._left, key=lambda key: (key.id, key.begin))
