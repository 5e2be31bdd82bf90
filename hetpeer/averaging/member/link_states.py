"""Which peers a volunteer cannot send to, whatever the step: shunned ones, and those whose links are
congested. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect, Tell

MOST_SHUNNED = 256
"""Peers that one `Shuns` names at most."""


class LinkStates:
    """Shunned peers and congested links; both outlive a step.

    >>> links = LinkStates()
    >>> links.shun("bad peer")
    >>> links.tell_shunned({"bad peer", "other"})
    [Tell(message=Shuns(kind='shuns', peers=('bad peer',)))]
    >>> links.tell_shunned({"bad peer", "other"})
    []
    """

    def __init__(self) -> None:
        self.shunned: set[str] = set()
        """Peers that have offended too often: the volunteer exchanges no tensors with them for now."""
        self.congested: dict[str, int] = {}
        """Peer → the link takes no forwards with so many blocks or more left to the loss."""
        self._told: set[str] = set()
        """Shunned peers that the coordinator knows of."""

    def shun(self, peer: str) -> None:
        """Exchange no tensors with `peer` until `accept`."""
        self.shunned.add(peer)

    def accept(self, peer: str) -> None:
        """Exchange tensors with `peer` again."""
        self.shunned.discard(peer)

    def congest(self, peer: str, blocks: int | None) -> None:
        """The link to `peer` takes no forwards with `blocks` or more left to the loss; None: it takes all."""
        if blocks is None:
            self.congested.pop(peer, None)
        else:
            self.congested[peer] = blocks

    def tell_shunned(self, partners: Iterable[str], *, again: bool = False) -> list[Effect]:
        """Name the shunned ones of `partners` to the coordinator, if they have changed, or `again`.

        Strangers that were turned away are of no interest to it.
        """
        shunned = self.shunned.intersection(partners)
        if shunned == self._told and not (again and shunned):
            return []
        self._told = shunned
        return [Tell(m.Shuns(peers=tuple(sorted(shunned)[:MOST_SHUNNED])))]
