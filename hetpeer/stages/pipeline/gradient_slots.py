"""Gradient slots: the microbatch ids in a holder's gradient sums.

Pure bookkeeping, no tensors. A slot is numbered; for each block it holds the ids whose gradients the worker
adds up in that slot's buffer, in the order in which it adds them. Nothing is ever added to an unknown set,
and a sealed slot does not change until the coordinator has said for each of its blocks whether it counts. At
most three slots live at any block: the accepted one, into which newly accepted ones are merged, the sealed
one, and the open one, so that work goes on while the coordinator's answer is under way (docs/protocol.md,
step 3).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

LIVE = 3
"""Slots that may live at a block at once; each is a vector in the worker's memory."""
CHECKS = 1 << 40
"""First number of the slots of spot checks, which count nowhere (docs/trust.md); above all others."""


class SlotState(enum.Enum):
    """A slot's life: OPEN takes ids, SEALED waits for the coordinator, ACCEPTED counts."""

    OPEN = "open"
    SEALED = "sealed"
    ACCEPTED = "accepted"


@dataclass(slots=True)
class _Slot:
    number: int
    seal: SlotState = SlotState.OPEN
    ids: dict[int, dict[int, None]] = field(default_factory=dict)
    """Block → ids folded there, in the order of folding."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Effect: add slot `source` to slot `target` at `block`, then forget `source` there."""

    block: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Effect: forget slot `slot` at `block`."""

    block: int
    slot: int


class GradientSlots:
    """The slots of one holder in one step.

    `capacity` is S of docs/protocol.md: a slot with that many ids is sealed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next = 0
        self._slots: dict[int, _Slot] = {}

    def can_fold(self) -> bool:
        """Whether a backward may start: there is an open slot with room, or room for a new slot."""
        open_slot = self._find(SlotState.OPEN)
        if open_slot is not None:
            return self._size(open_slot) < self._capacity
        return len(self._slots) < LIVE

    def fold(self, microbatch: int, blocks: Iterable[int]) -> tuple[int, tuple[int, ...]]:
        """Enter `microbatch` into the open slot; returns the slot's number and the blocks at which to add it.

        Blocks where a live slot already holds the id are left out. The caller has asked `can_fold`.
        """
        slot = self._find(SlotState.OPEN)
        if slot is None:
            slot = _Slot(self._next)
            self._slots[self._next] = slot
            self._next += 1
        fresh = tuple(b for b in blocks if not self.holds(microbatch, b))
        for block in fresh:
            slot.ids.setdefault(block, {})[microbatch] = None
        return slot.number, fresh

    def holds(self, microbatch: int, block: int) -> bool:
        """Whether a live slot holds the id at `block`."""
        return any(microbatch in slot.ids.get(block, ()) for slot in self._slots.values())

    def should_seal(self, idle: Callable[[], bool]) -> bool:
        """Whether to seal the open slot: it is full, or not empty while the step is `idle` here."""
        slot = self._find(SlotState.OPEN)
        if slot is None or self._find(SlotState.SEALED) is not None:
            return False
        size = self._size(slot)
        return size >= self._capacity or (size > 0 and idle())

    def seal(self) -> tuple[int, dict[int, tuple[int, ...]]]:
        """Seal the open slot; returns its number and its ids for each block, in the order of folding."""
        slot = self._find(SlotState.OPEN)
        assert slot is not None
        slot.seal = SlotState.SEALED
        return slot.number, {block: tuple(ids) for block, ids in sorted(slot.ids.items())}

    def settle(self, number: int, refused: Iterable[int]) -> list[Merge | Drop]:
        """Take in the coordinator's answer on a sealed slot: `refused` blocks are dropped, others count."""
        slot = self._slots.get(number)
        if slot is None or slot.seal is not SlotState.SEALED:
            return []
        effects: list[Merge | Drop] = [Drop(b, number) for b in refused if slot.ids.pop(b, None) is not None]
        base = self._find(SlotState.ACCEPTED)
        if base is None:
            slot.seal = SlotState.ACCEPTED
            return effects
        for block, ids in slot.ids.items():
            base.ids.setdefault(block, {}).update(ids)
            effects.append(Merge(block, number, base.number))
        del self._slots[number]
        return effects

    def spoil(self) -> tuple[list[Merge | Drop], set[int]]:
        """Drop the open slot, since a backward broke half-way; returns the drops and the ids lost with it."""
        slot = self._find(SlotState.OPEN)
        if slot is None:
            return [], set()
        del self._slots[slot.number]
        return [Drop(b, slot.number) for b in slot.ids], {i for ids in slot.ids.values() for i in ids}

    def evict(self, block: int) -> list[Merge | Drop]:
        """Drop the accepted ids at `block`: a larger overlapping slot of another holder replaced them."""
        base = self._find(SlotState.ACCEPTED)
        if base is None or base.ids.pop(block, None) is None:
            return []
        return [Drop(block, base.number)]

    def accepted(self) -> int | None:
        """Number of the accepted slot, by which a reduce plan names this holder's sum; None if none."""
        base = self._find(SlotState.ACCEPTED)
        return None if base is None else base.number

    def contents(self) -> Mapping[int, Mapping[int, frozenset[int]]]:
        """Slot → block → ids, for status and tests."""
        return {n: {b: frozenset(ids) for b, ids in s.ids.items()} for n, s in self._slots.items()}

    def _find(self, seal: SlotState) -> _Slot | None:
        return next((slot for slot in self._slots.values() if slot.seal is seal), None)

    @staticmethod
    def _size(slot: _Slot) -> int:
        return max((len(ids) for ids in slot.ids.values()), default=0)
