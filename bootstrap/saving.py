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
        self._version: int | None = None
        self._savers: dict[int, str] = {}
        self._digests: dict[int, str] = {}
        self._again = False
        self.failures = 0
        """Checkpoints that could not be completed."""

    def begin(self, *, wanted: bool = False) -> list[Effect]:
        """At a step border: collect the current version if that is due, or `wanted` now."""
        reign, version = self._reign, self._reign.version
        due = reign.agenda.saves(version) or self._again or wanted
        if not due or reign.stored or self._version == version or reign.members.uncovered():
            return []
        self._version, self._savers, self._digests, self._again = version, self._choose(), {}, False
        effects: list[Effect] = [CollectCheckpoint(version, dict(self._savers), reign.line.cluster)]
        for peer in sorted(set(self._savers.values())):
            blocks = tuple(b for b, p in self._savers.items() if p == peer)
            effects.append(Send(peer, m.Save(line=reign.line, version=version, blocks=blocks)))
        return effects

    @property
    def under_way(self) -> bool:
        """Whether the current version is being collected."""
        return self._version == self._reign.version

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

    def saved(self, version: int, block: int, digest: str) -> list[Effect]:
        """The state of `block` lies durably in the store; the last one makes it a checkpoint."""
        if version != self._version or block not in self._savers:
            return []
        self._digests[block] = digest
        if len(self._digests) < len(self._savers):
            return []
        self.abandon()
        digests = [self._digests[b] for b in sorted(self._digests)]
        return [self._reign.log(kind="checkpoint", version=version, blocks=digests)]

    def failed(self, version: int) -> None:
        """The checkpoint of `version` cannot be completed; another is begun at the next border."""
        if version == self._version:
            self.abandon()
            self._again = True
            self.failures += 1

    def lost(self, peer: str) -> None:
        """`peer` has nothing to save any more."""
        if self._version is not None and peer in self._savers.values():
            self.failed(self._version)

    def abandon(self) -> None:
        """Expect nothing more (the run went back, or it is done)."""
        self._version, self._savers = None, {}
