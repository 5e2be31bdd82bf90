"""Collecting a checkpoint: who uploads which block, and when all have arrived.

Pure. A checkpoint exists once one log record names the digests of all its blocks: a consistent cut by construction.
"""

from __future__ import annotations

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.decisions import CollectCheckpoint, Effect, Send
from hetpeer.bootstrap.reign import Reign


class Saving:
    """At most one checkpoint is collected at a time."""

    def __init__(self, reign: Reign) -> None:
        self._reign = reign
        self._order: CollectCheckpoint | None = None
        self._digests: dict[int, str] = {}
        self._again = False
        self.failures = 0
        """Checkpoints that could not be completed."""

    def begin(self, *, wanted: bool = False) -> list[Effect]:
        """At a step border: collect the current version if that is due, or `wanted` now."""
        reign, version = self._reign, self._reign.version
        due = reign.agenda.saves(version) or self._again or wanted
        if not due or reign.stored or self.under_way or reign.members.uncovered():
            return []
        self._order = order = CollectCheckpoint(reign.line, version, self._choose())
        self._digests, self._again = {}, False
        effects: list[Effect] = [order]
        for peer in sorted(set(order.savers.values())):
            blocks = tuple(b for b, p in order.savers.items() if p == peer)
            effects.append(Send(peer, m.Save(line=reign.line, version=version, blocks=blocks)))
        return effects

    @property
    def under_way(self) -> bool:
        """Whether the current version is being collected."""
        return self._order is not None and self._order.version == self._reign.version

    def _choose(self) -> dict[int, str]:
        """A holder for each block, the work shared evenly; after each failure another one comes first."""
        members = self._reign.members
        load: dict[str, int] = {}
        savers: dict[int, str] = {}
        for block in range(members.blocks):
            holders = members.holders(block)
            first = self.failures % len(holders)
            saver = min(holders[first:] + holders[:first], key=lambda peer: load.get(peer, 0))
            load[saver] = load.get(saver, 0) + 1
            savers[block] = saver
        return savers

    def saved(self, order: CollectCheckpoint, block: int, digest: str) -> list[Effect]:
        """The state of `block` lies durably in the store; the last one makes it a checkpoint. Of an order that is not the current one it is nothing."""
        if order != self._order or block not in order.savers:
            return []
        self._digests[block] = digest
        if len(self._digests) < len(order.savers):
            return []
        self.abandon()
        digests = [self._digests[b] for b in sorted(self._digests)]
        return [self._reign.log(kind="checkpoint", version=order.version, blocks=digests)]

    def failed(self, order: CollectCheckpoint) -> None:
        """`order` cannot be completed; another checkpoint is begun at the next border."""
        if order == self._order:
            self.abandon()
            self._again = True
            self.failures += 1

    def lost(self, peer: str) -> None:
        """`peer` has nothing to save any more."""
        if self._order is not None and peer in self._order.savers.values():
            self.failed(self._order)

    def abandon(self) -> None:
        """Expect nothing more (the run went back, or it is done)."""
        self._order = None
