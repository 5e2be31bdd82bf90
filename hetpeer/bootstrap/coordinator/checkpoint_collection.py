"""Collecting a checkpoint: who uploads which block, and when all have arrived.

Pure. A checkpoint exists once one log record names the digests of all its blocks: a consistent cut by construction. They are what most of those say who have made these states,
and not the saver alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import CollectCheckpoint, Effect, Send
from hetpeer.bootstrap.trust.state_agreement import StateAgreement


class CheckpointCollection:
    """At most one checkpoint is collected at a time."""

    def __init__(self, context: CoordinatorContext, agreement: StateAgreement) -> None:
        self._context = context
        self._agreement = agreement
        self._order: CollectCheckpoint | None = None
        self._digests: dict[int, str] = {}
        self._settled: dict[int, str | None] | None = None
        """What was said of these states, once that version is past."""
        self._until = 0.0
        """All are there, and so long it is waited for who has not said yet what its state is."""
        self._again = False
        self.failures = 0
        """Checkpoints that could not be completed."""

    def begin(self, *, wanted: bool = False) -> list[Effect]:
        """At a step border: collect the current version if that is due, or `wanted` now."""
        context, version = self._context, self._context.version
        due = context.agenda.saves(version) or self._again or wanted
        if not due or context.stored or self.under_way or context.members.uncovered():
            return []
        if self._order is not None and not (wanted or context.agenda.over):
            return []  # an older one takes longer than until the next is due: it is worth more than none at all
        self._order = order = CollectCheckpoint(context.line, version, self._choose())
        self._digests, self._settled, self._again = {}, None, False
        effects: list[Effect] = [order]
        for peer in sorted(set(order.savers.values())):
            blocks = tuple(b for b, p in order.savers.items() if p == peer)
            effects.append(Send(peer, m.Save(line=context.line, version=version, blocks=blocks)))
        return effects

    @property
    def under_way(self) -> bool:
        """Whether the current version is being collected."""
        return self._order is not None and self._order.version == self._context.version

    def _choose(self) -> dict[int, str]:
        """A holder for each block, the work shared evenly; after each failure another one comes first."""
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
        """The state of `block` lies durably in the store. Of an order that is not the current one it is nothing."""
        if order == self._order and block in order.savers:
            self._digests[block] = digest
            self._until = now + self._context.config.lease_s

    def look(self, now: float) -> list[Effect]:
        """The last state makes it a checkpoint, when it is certain that they are the right ones."""
        order, words = self._order, self._words(now)
        if order is None or not words or self._false(words):
            return []
        if None in words.values() and not self._late(now):
            return []
        digests = [self._digests[b] for b in sorted(self._digests)]
        self.abandon()
        return [self._context.log(kind="checkpoint", version=order.version, blocks=digests)]

    def false(self, now: float) -> dict[str, str]:
        """Who has given another state than most say that it is, with the reason; that checkpoint has failed."""
        order, found = self._order, self._false(self._words(now))
        if order is None or not found:
            return {}
        self.failed(order)
        return {order.savers[block]: f"it gave another state of block {block} than it has" for block in found}

    def _words(self, now: float) -> Mapping[int, str | None]:
        """On each block, once all their states are there; None: nothing is certain."""
        if self._order is None or len(self._digests) < len(self._order.savers):
            return {}
        if self._settled is not None:
            return self._settled
        last = self._late(now)
        return {block: self._agreement.settled(block, last=last) for block in self._digests}

    def _late(self, now: float) -> bool:
        """Whether nobody is waited for any more who has said nothing."""
        return self._settled is not None or now >= self._until

    def _false(self, words: Mapping[int, str | None]) -> list[int]:
        return [block for block, right in words.items() if right not in (None, self._digests[block])]

    def settle(self) -> None:
        """The current version is about to be past: nobody will say anything of its states any more."""
        if self.under_way and self._order is not None:
            blocks = self._order.savers
            self._settled = {block: self._agreement.settled(block, last=True) for block in blocks}

    def soon(self) -> None:
        """The next version is to be saved, whatever is due."""
        self._again = True

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
