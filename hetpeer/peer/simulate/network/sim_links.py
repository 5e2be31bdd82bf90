"""Tensors of simulated volunteers, and the interface of a link with flow control.

A tensor is a value behind a handle, released one by one or with its step, as in the daemon's arena.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from hetpeer.averaging.effects import Effect, StepId
from hetpeer.averaging.member.member import Member
from hetpeer.dht.streams.flow_control import Pool
from hetpeer.peer.simulate.sim_hooks import ViolationError
from hetpeer.stages.pipeline.effects import Handle


class SimTensors:
    """Handle → value. Use after a release raises `ViolationError`; a second release changes nothing."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._values: dict[Handle, Any] = {}
        self._senders: dict[Handle, str] = {}
        self._steps: dict[StepId, list[Handle]] = {}
        self._lent: dict[Handle, Callable[[], None]] = {}

    def new(self, step: StepId, value: Any, sender: str = "") -> Handle:
        """Handle of a new tensor `value` of `step`."""
        handle = next(self._next)
        self._values[handle] = value
        self._senders[handle] = sender
        self._steps.setdefault(step, []).append(handle)
        return handle

    def value(self, handle: Handle) -> Any:
        """The value behind `handle`. Raises `ViolationError` after its release."""
        if handle not in self._values:
            raise ViolationError(f"tensor {handle} is used after its release")
        return self._values[handle]

    def sender(self, handle: Handle) -> str:
        """The volunteer that sent the tensor; empty if it was made here."""
        return self._senders[handle]

    def release(self, handle: Handle) -> None:
        """Forget the value behind `handle`; no effect if that was done before."""
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


Take = Callable[[Member, Handle], Iterable[Effect]]
"""Function that gives an arrived tensor to the receiver's core, under the receiver's handle."""


@dataclass(frozen=True, slots=True)
class SimFrame:
    """Tensor that is to go to another volunteer; `cost` is in the units of the pool's grants."""

    pool: Pool
    cost: int
    tag: StepId
    value: object
    take: Take


class SimLink(Protocol):
    """Link from one process to another on which tensors wait for grants. `hetpeer simulate` has none."""

    @property
    def stands(self) -> bool:
        """Whether both ends are still the processes between which it was opened."""

    def send(self, frame: SimFrame) -> None:
        """Queue a tensor; it leaves once it is granted."""

    def nudge(self, pool: Pool, word: Callable[[Member], Iterable[Effect]]) -> None:
        """Send `word`, which stands for a repeated activation, if that activation would have to wait."""

    def end_step(self, step: StepId) -> None:
        """Drop the queued tensors of `step`."""
