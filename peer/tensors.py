"""The tensors a volunteer keeps in the arena: what the protocol core calls handles.

Every tensor belongs to one step and lives until the core releases it or the step ends. A tensor that the compute
worker still reads or writes is pinned: its memory is given back only afterwards, or a stale command could write into
somebody else's tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetpeer.averaging.effects import StepId
from hetpeer.stages.execution.arena import Arena, Extent

TRIM_STEPS = 64
"""Every so many steps the arena's free pages go back to the system, so that a peak is not kept for ever."""


@dataclass(eq=False, slots=True)
class Tensor:
    """A bundle of activations, its gradient, or a piece of a flat gradient, as bytes in the arena."""

    extent: Extent
    step: StepId
    pins: int = 0
    released: bool = False
    length: int | None = None
    """Bytes that mean something, where that is not all of the extent."""
    sparse: bool = False
    """Whether its zeros stand for what a codec left out."""
    sender: str = ""
    """The peer that it came from."""


class TensorStore:
    """Allocates tensors in `arena` and frees them step by step."""

    def __init__(self, arena: Arena) -> None:
        self.capacity = arena.capacity
        self._arena = arena
        self._steps: dict[StepId, set[Tensor]] = {}
        self._sharers: Counter[Extent] = Counter()
        self._lent: dict[Extent, Callable[[], None]] = {}
        self._ended = 0

    def new(self, step: StepId, nbytes: int) -> Tensor:
        """Room for a tensor of `step`. Raises ArenaFullError."""
        return self._add(Tensor(self._arena.allocate(nbytes), step))

    def share(self, tensor: Tensor) -> Tensor:
        """The same memory with one more owner: released apart, freed with the last. Nobody may write to it any more."""
        self._sharers[tensor.extent] += 1
        return self._add(Tensor(tensor.extent, tensor.step, sparse=tensor.sparse))

    def lend(self, tensor: Tensor, back: Callable[[], None]) -> None:
        """`back` is called when the memory of `tensor` is free again."""
        self._lent[tensor.extent] = back

    def hand_on(self, tensor: Tensor, other: Tensor) -> None:
        """What was lent to `tensor` is lent to `other`, which was made of it."""
        other.sender = tensor.sender
        if tensor.extent in self._lent:
            self._lent[other.extent] = self._lent.pop(tensor.extent)

    def _add(self, tensor: Tensor) -> Tensor:
        self._steps.setdefault(tensor.step, set()).add(tensor)
        return tensor

    def view(self, tensor: Tensor) -> memoryview:
        return self._arena.view(tensor.extent)[: tensor.length]

    def release(self, tensor: Tensor) -> None:
        """Nobody needs `tensor` any more. Releasing twice is no error: a step's end releases everything."""
        if tensor.released:
            return
        tensor.released = True
        left = self._steps.get(tensor.step, set())
        left.discard(tensor)
        if not left:
            self._steps.pop(tensor.step, None)
        if not tensor.pins:
            self._free(tensor.extent)

    def end_step(self, step: StepId) -> None:
        """Release every tensor of `step`."""
        for tensor in list(self._steps.pop(step, ())):
            self.release(tensor)
        self._ended += 1
        if self._ended % TRIM_STEPS == 0:
            self._arena.trim()

    def pin(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Keep the memory of `tensors` in place until `unpin`, even if they are released meanwhile."""
        held = tuple(tensors)
        for tensor in held:
            tensor.pins += 1
        return held

    def unpin(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.pins -= 1
            if tensor.released and not tensor.pins:
                self._free(tensor.extent)

    def _free(self, extent: Extent) -> None:
        if self._sharers[extent]:
            self._sharers[extent] -= 1
            return
        del self._sharers[extent]
        self._arena.release(extent)
        if (back := self._lent.pop(extent, None)) is not None:
            back()
