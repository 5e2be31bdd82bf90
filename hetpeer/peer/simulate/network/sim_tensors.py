"""Tensors of one simulated volunteer: values behind handles, freed step by step as the daemon's arena does
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hetpeer.averaging.effects import StepId
from hetpeer.peer.simulate.sim_hooks import ViolationError
from hetpeer.stages.pipeline.effects import Handle


class SimTensors:
    """Handle → value. A value that is used after its release is a violation; a second release is not."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._values: dict[Handle, Any] = {}
        self._senders: dict[Handle, str] = {}
        self._steps: dict[StepId, list[Handle]] = {}
        self._lent: dict[Handle, Callable[[], None]] = {}

    def new(self, step: StepId, value: Any, sender: str = "") -> Handle:
        handle = next(self._next)
        self._values[handle] = value
        self._senders[handle] = sender
        self._steps.setdefault(step, []).append(handle)
        return handle

    def value(self, handle: Handle) -> Any:
        if handle not in self._values:
            raise ViolationError(f"tensor {handle} is used after its release")
        return self._values[handle]

    def sender(self, handle: Handle) -> str:
        """The volunteer that sent the tensor; empty if it was made here."""
        return self._senders[handle]

    def release(self, handle: Handle) -> None:
        self._values.pop(handle, None)
        self._senders.pop(handle, None)
        if (back := self._lent.pop(handle, None)) is not None:
            back()

    def lend(self, handle: Handle, back: Callable[[], None]) -> None:
        """Call `back` when the tensor is released."""
        self._lent[handle] = back

    def end_step(self, step: StepId) -> None:
        """Release every tensor of `step`."""
        for handle in self._steps.pop(step, ()):
            self.release(handle)

    def __len__(self) -> int:
        return len(self._values)
