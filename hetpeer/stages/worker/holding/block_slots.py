"""The slots of a block: sums of some microbatches' gradients and weighted statistics, step by step.

Few of them are in memory. If one more is needed there, the one that was used longest ago goes to the scratch
file: a sealed one, which is read once more at most. If the file has no room, it stays in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import Tensor

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.worker.freed_memory import give_back
from hetpeer.stages.worker.holding.residence import Residence
from hetpeer.stages.worker.holding.stored_vector import InFile, InMemory, StoredVector, pieces
from hetpeer.stages.worker.tensor_staging import CommandError

Key = tuple[int, int]
"""(step, number of the slot)."""


class BlockSlots:
    """The slots of block `block`, each of `count` numbers."""

    def __init__(self, block: int, count: int, residence: Residence) -> None:
        self._block = block
        self._count = count
        self._residence = residence
        self._vectors: dict[Key, StoredVector] = {}
        """Ordered by last use."""
        self._inspected: Key | None = None
        """The slot that was last found finite; None once it has changed."""
        self._said = False
        self._reduced = False

    def __contains__(self, key: Key) -> bool:
        return key in self._vectors

    def room(self, step: int, slot: int) -> Tensor:
        """The slot's sum in memory, or a vector of undefined content that `put` will make the slot's."""
        held = self._vectors.get((step, slot))
        if isinstance(held, InMemory):
            self._used((step, slot))
            return held.whole()
        self._make_room()
        found = self._residence.sum_in_memory(self._count)
        if held is not None:
            InMemory(found).fill(held)
            held.free()
            self.put(step, slot, found)
        return found

    def put(self, step: int, slot: int, room: Tensor) -> None:
        """Make `room` the slot's sum."""
        self._changes((step, slot))
        self._vectors.pop((step, slot), None)
        self._vectors[step, slot] = InMemory(room)

    def at(self, step: int, slot: int) -> StoredVector:
        """The sum of a slot. Raises CommandError if there is none."""
        if (step, slot) not in self._vectors:
            raise CommandError(f"block {self._block} has no slot {slot} of step {step}")
        return self._vectors[step, slot]

    def inspected(self, step: int, slot: int) -> None:
        """Note that a slot was found finite."""
        self._inspected = step, slot

    def _changes(self, key: Key) -> None:
        if self._inspected == key:
            self._inspected = None

    def take(self, step: int, slot: int | None) -> StoredVector:
        """The sum of a slot, which is forgotten; the caller frees it.

        Raises CommandError if it was not found finite, or has changed since.
        """
        if slot is None or self._inspected != (step, slot) or self._inspected not in self._vectors:
            raise CommandError(f"slot {slot} of step {step} at block {self._block} is not as inspected")
        return self._vectors.pop((step, slot))

    def merge(self, step: int, source: int, target: int) -> None:
        """Add `source` to `target`, or make it `target` if there is none yet; `source` is forgotten."""
        self._changes((step, source))
        self._changes((step, target))
        given = self.at(step, source)
        if source == target:
            return
        into = self._vectors.get((step, target), given)
        if into is not given:
            if isinstance(
                into, InFile
            ):  # a + b is b + a, to the bit: the sum stays in memory if one is there
                into, given = given, into
            for begin, end in pieces(0, self._count):
                piece = into.piece(begin, end)
                into.keep(begin, piece.add_(given.piece(begin, end)))
            given.free()
        del self._vectors[step, source]
        self._vectors.pop((step, target), None)
        self._vectors[step, target] = into

    def drop(self, step: int, slot: int) -> None:
        """Forget a slot, if it is there."""
        self._changes((step, slot))
        if (held := self._vectors.pop((step, slot), None)) is not None:
            held.free()

    def make_way(self) -> None:
        """Keep one slot fewer in memory until `sum_gone`: the sum of a reduce comes in its place."""
        if not self._reduced and self._residence.sum_among_slots:
            self._reduced = True
            before = len(list(self._in_memory()))
            self._make_room(0)
            if len(list(self._in_memory())) < before:
                give_back()

    def sum_gone(self) -> None:
        """Note that the reduce is over."""
        self._reduced = False

    def clear(self, step: int | None = None) -> None:
        """Forget all slots of `step`; None: of every step."""
        self.sum_gone()
        for key in [key for key in self._vectors if step in (None, key[0])]:
            self.drop(*key)

    def _used(self, key: Key) -> None:
        self._vectors[key] = self._vectors.pop(key)

    def _in_memory(self) -> Iterator[Key]:
        """Slots in memory, the one used longest ago first."""
        return (key for key, vector in self._vectors.items() if isinstance(vector, InMemory))

    def _make_room(self, more: int = 1) -> None:
        """Move slots to the file until there is room for so many `more` in memory."""
        most, scratch = self._residence.slots, self._residence.scratch
        if most is None or scratch is None:
            return
        inside = list(self._in_memory())
        for key in inside[: max(len(inside) - most + self._reduced + more, 0)]:
            try:
                moved = InFile(scratch, self._count)
            except LocalError as error:
                if not self._said:
                    self._said = True
                    print(f"a sum stays in memory: {error}", file=sys.stderr)
                return
            try:
                moved.fill(self._vectors[key])
            except LocalError:
                moved.free()
                raise
            self._vectors[key] = moved  # keeps its place in the order
