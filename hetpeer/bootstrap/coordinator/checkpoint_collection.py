"""Checkpoint collection: who uploads which block, and when all states have arrived.

Pure. A checkpoint exists once one log record names the digests of all its blocks, so it is a consistent cut
by construction. A block's digest is the one reported by most of the volunteers that computed its state.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import CollectCheckpoint, Effect, Send
from hetpeer.bootstrap.trust.state_agreement import StateAgreement


class CheckpointCollection:
    """The checkpoint that is collected now; at most one at a time."""

    def __init__(self, context: CoordinatorContext, agreement: StateAgreement) -> None:
        self._context = context
        self._agreement = agreement
        self._order: CollectCheckpoint | None = None
        self._digests: dict[int, str] = {}
        self._settled: dict[int, str | None] | None = None
        """Block → its agreed digest, kept once that version is past; None before."""
        self._until = 0.0
        """All states have arrived; holders have until then to report their digests."""
        self._again = False
        self.failures = 0
        """Checkpoints that could not be completed."""

    def begin(self, *, wanted: bool = False) -> list[Effect]:
        """Collect the current version at the step barrier if it is due, or if it is `wanted` now."""
        context, version = self._context, self._context.history.version
        due = context.agenda.saves(version) or self._again or wanted
        if not due or context.history.stored or self.under_way or context.members.uncovered():
            return []
        if not context.agenda.may_save:
            return []
        if self._order is not None and not (wanted or context.agenda.over):
            return []  # one that takes longer than the interval is worth more than none at all
        self._order = order = CollectCheckpoint(context.line, version, self._choose())
        self._digests, self._settled, self._again = {}, None, False
        effects: list[Effect] = [order]
        stored = None if context.history.checkpoint is None else context.history.checkpoint_version
        for peer in sorted(set(order.savers.values())):
            blocks = tuple(b for b, p in order.savers.items() if p == peer)
            save = m.Save(line=context.line, version=version, blocks=blocks, stored=stored)
            effects.append(Send(peer, save))
        return effects

    @property
    def under_way(self) -> bool:
        """Whether the current version is being collected."""
        return self._order is not None and self._order.version == self._context.history.version

    def _choose(self) -> dict[int, str]:
        """Block → a holder that uploads it, shared evenly; each failure shifts the choice to another."""
        members = self._context.members
        load: dict[str, int] = {}
        savers: dict[int, str] = {}
        for block in range(members.blocks):
            holders = members.holders(block)
            first = self.failures % len(holders)
            saver = min(holders[first:] + holders[:first], key=lambda peer: load.get(peer, 0))
            load[saver] = load.get(saver, 0) + 1
            savers[block] = saver
        return savers

    def saved(self, order: CollectCheckpoint, block: int, digest: str, now: float) -> None:
        """Note that the state of `block` lies durably in the store; an outdated order is ignored."""
        if order == self._order and block in order.savers:
            self._digests[block] = digest
            self._until = now + self._context.config.lease_s

    def look(self, now: float) -> list[Effect]:
        """Complete the checkpoint when its last state has arrived and all digests are certainly right."""
        order, words = self._order, self._words(now)
        if order is None or not words or self._false(words):
            return []
        if None in words.values() and not self._late(now):
            return []
        digests = [self._digests[b] for b in sorted(self._digests)]
        self.abandon()
        return [self._context.log(kind="checkpoint", version=order.version, blocks=digests)]

    def false(self, now: float) -> dict[str, str]:
        """Uploaders whose state differs from the agreed one → reason. Any makes the checkpoint fail."""
        order, found = self._order, self._false(self._words(now))
        if order is None or not found:
            return {}
        self.failed(order)
        return {order.savers[block]: f"it gave another state of block {block} than it has" for block in found}

    def _words(self, now: float) -> Mapping[int, str | None]:
        """Block → the agreed digest (None: not certain yet); empty until all states have arrived."""
        if self._order is None or len(self._digests) < len(self._order.savers):
            return {}
        if self._settled is not None:
            return self._settled
        last = self._late(now)
        return {block: self._agreement.settled(block, last=last) for block in self._digests}

    def _late(self, now: float) -> bool:
        """Whether holders that have reported nothing are no longer waited for."""
        return self._settled is not None or now >= self._until

    def _false(self, words: Mapping[int, str | None]) -> list[int]:
        return [block for block, right in words.items() if right not in (None, self._digests[block])]

    def settle(self) -> None:
        """Keep the agreed digests of the current version: it is about to end; nobody reports them later."""
        if self.under_way and self._order is not None:
            blocks = self._order.savers
            self._settled = {block: self._agreement.settled(block, last=True) for block in blocks}

    def soon(self) -> None:
        """Save the next version, even if none is due."""
        self._again = True

    def failed(self, order: CollectCheckpoint) -> None:
        """`order` cannot be completed: begin another checkpoint at the next barrier."""
        if order == self._order:
            self.abandon()
            self._again = True
            self.failures += 1

    def lost(self, peer: str) -> None:
        """`peer` no longer has its state: a checkpoint that it uploads for fails."""
        if self._order is not None and peer in self._order.savers.values():
            self.failed(self._order)

    def abandon(self) -> None:
        """Expect nothing more: the run rolled back, or the checkpoint is complete."""
        self._order = None
