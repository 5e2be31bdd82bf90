"""The tensors a volunteer keeps in the arena: what the protocol core calls handles.

Every tensor belongs to one step and lives until the core releases it or the step ends. A tensor that the compute
worker still reads or writes is pinned: its memory is given back only afterwards, or a stale command could write into
somebody else's tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetpeer.averaging.effects import StepId
from hetpeer.stages.execution.arena import Arena, Extent


@dataclass(eq=False, slots=True)
class Tensor:
    """A bundle of activations, its gradient, or a piece of a flat gradient, as bytes in the arena."""

    extent: Extent
    step: StepId
    pins: int = 0
    released: bool = False


class TensorStore:
    """Allocates tensors in `arena` and frees them step by step."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._steps: dict[StepId, set[Tensor]] = {}

    def new(self, step: StepId, nbytes: int) -> Tensor:
        """Room for a tensor of `step`. Raises ArenaFullError."""
        tensor = Tensor(self._arena.allocate(nbytes), step)
        self._steps.setdefault(step, set()).add(tensor)
        return tensor

    def view(self, tensor: Tensor) -> memoryview:
        return self._arena.view(tensor.extent)

    def release(self, tensor: Tensor) -> None:
        """Nobody needs `tensor` any more. Releasing twice is no error: a step's end releases everything."""
        if tensor.released:
            return
        tensor.released = True
        self._steps.get(tensor.step, set()).discard(tensor)
        if not tensor.pins:
            self._arena.release(tensor.extent)

    def end_step(self, step: StepId) -> None:
        """Release every tensor of `step`."""
        for tensor in list(self._steps.pop(step, ())):
            self.release(tensor)

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
                self._arena.release(tensor.extent)
