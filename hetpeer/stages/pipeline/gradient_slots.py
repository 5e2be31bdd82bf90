"""Slots: which microbatch ids a holder's gradient sums are made of.

Pure bookkeeping, no tensors. A slot is numbered; per block it holds a set of ids whose gradients the worker adds up in
that slot's buffer. Nothing is ever added to an unknown set, and a sealed slot never changes until the coordinator has
said of each of its blocks whether it counts. At most three slots live at any block: the accepted one, into which newly
accepted ones are merged, the sealed one, and the open one, so that work goes on while the coordinator's word is under
way (docs/protocol.md, step 3).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LIVE = 3
"""Slots that may live at a block at once; each is a vector in the worker's memory."""
CHECKS = 1 << 40
"""From this number on: slots of spot checks, which count nowhere (docs/trust.md). No step has so many others."""


class Seal(enum.Enum):
    """A slot's life: OPEN takes ids, SEALED waits for the coordinator's word, ACCEPTED counts."""

    OPEN = "open"
    SEALED = "sealed"
    ACCEPTED = "accepted"


@dataclass(slots=True)
class _Slot:
    number: int
    seal: Seal = Seal.OPEN
    ids: dict[int, set[int]] = field(default_factory=dict)
    """Block → ids folded there."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Add slot `source` into slot `target` at `block`, then forget `source` there."""

    block: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget slot `slot` at `block`."""

    block: int
    slot: int


class SlotBook:
    """The slots of one holder in one step.

    `capacity` is S of docs/protocol.md: a slot with that many ids is sealed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next = 0
        self._slots: dict[int, _Slot] = {}

    def can_fold(self) -> bool:
        """Whether a backward may start: an open slot with room, or room for a new slot."""
        open_slot = self._find(Seal.OPEN)
        if open_slot is not None:
            return self._size(open_slot) < self._capacity
        return len(self._slots) < LIVE

    def fold(self, microbatch: int, blocks: Iterable[int]) -> tuple[int, tuple[int, ...]]:
        """Enter `microbatch` into the open slot; returns the slot's number and the blocks at which to add it.

        A block where a live slot already holds the id is left out. The caller has asked `can_fold`.
        """
        slot = self._find(Seal.OPEN)
        if slot is None:
            slot = _Slot(self._next)
            self._slots[self._next] = slot
            self._next += 1
        fresh = tuple(b for b in blocks if not self.holds(microbatch, b))
        for block in fresh:
            slot.ids.setdefault(block, set()).add(microbatch)
        return slot.number, fresh

    def holds(self, microbatch: int, block: int) -> bool:
        return any(microbatch in slot.ids.get(block, ()) for slot in self._slots.values())

    def should_seal(self, *, idle: bool) -> bool:
        """Whether the open slot is due: full, or not empty while nothing of the step is in progress here."""
        slot = self._find(Seal.OPEN)
        if slot is None or self._find(Seal.SEALED) is not None:
            return False
        size = self._size(slot)
        return size >= self._capacity or (idle and size > 0)

    def seal(self) -> tuple[int, dict[int, tuple[int, ...]]]:
        """Seal the open slot; returns its number and its ids per block."""
        slot = self._find(Seal.OPEN)
        assert slot is not None
        slot.seal = Seal.SEALED
        return slot.number, {block: tuple(sorted(ids)) for block, ids in sorted(slot.ids.items())}

    def settle(self, number: int, refused: Iterable[int]) -> list[Merge | Drop]:
        """The coordinator's word on a sealed slot: `refused` blocks are dropped, the others count from now on."""
        slot = self._slots.get(number)
        if slot is None or slot.seal is not Seal.SEALED:
            return []
        effects: list[Merge | Drop] = [Drop(b, number) for b in refused if slot.ids.pop(b, None) is not None]
        base = self._find(Seal.ACCEPTED)
        if base is None:
            slot.seal = Seal.ACCEPTED
            return effects
        for block, ids in slot.ids.items():
            base.ids.setdefault(block, set()).update(ids)
            effects.append(Merge(block, number, base.number))
        del self._slots[number]
        return effects

    def spoil(self) -> tuple[list[Merge | Drop], set[int]]:
        """Drop the open slot as a whole (a backward broke half-way); returns the drops and the ids lost with it."""
        slot = self._find(Seal.OPEN)
        if slot is None:
            return [], set()
        del self._slots[slot.number]
        return [Drop(b, slot.number) for b in slot.ids], {i for ids in slot.ids.values() for i in ids}

    def evict(self, block: int) -> list[Merge | Drop]:
        """Drop what counted so far at `block`: a larger overlapping slot of another holder took its place."""
        base = self._find(Seal.ACCEPTED)
        if base is None or base.ids.pop(block, None) is None:
            return []
        return [Drop(block, base.number)]

    def accepted(self) -> int | None:
        """The number of the accepted slot, under which the plan names this holder's sum."""
        base = self._find(Seal.ACCEPTED)
        return None if base is None else base.number

    def live(self, block: int) -> int:
        """How many slots hold something at `block`."""
        return sum(block in slot.ids for slot in self._slots.values())

    def contents(self) -> Mapping[int, Mapping[int, frozenset[int]]]:
        """Slot → block → ids, for status and tests."""
        return {n: {b: frozenset(ids) for b, ids in s.ids.items()} for n, s in self._slots.items()}

    def _find(self, seal: Seal) -> _Slot | None:
        return next((slot for slot in self._slots.values() if slot.seal is seal), None)

    @staticmethod
    def _size(slot: _Slot) -> int:
        return max((len(ids) for ids in slot.ids.values()), default=0)
