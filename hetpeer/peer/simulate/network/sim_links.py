"""Tensors of simulated volunteers, and links between them with flow control: the daemon's own grants.

A tensor is a value behind a handle, released one by one or with its step, as in the daemon's arena. On a
link a tensor waits for a grant; a receiver grants room for a few. A tensor that has arrived uses its grant
until its handle is released. A link connects two processes: when either ends, tensors on their way are lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.member import Effect, Member
from hetpeer.dht.streams.flow_control import GrantBudget, GrantQueue, HeldBytes, LinkGrants, Pool
from hetpeer.peer.simulate.sim_hooks import ViolationError
from hetpeer.peer.transport.uplink import ACTIVATIONS, Pressure
from hetpeer.stages.pipeline.effects import Handle

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_volunteer import SimVolunteer


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


class SimLink:
    """Link from one process to another. The receiver has room for `frames` bundles of each kind."""

    def __init__(self, sender: SimVolunteer, receiver: SimVolunteer, frames: int) -> None:
        self._sender, self._receiver = sender, receiver
        self._processes = sender.process, receiver.process
        self._queue: GrantQueue[SimFrame] = GrantQueue()
        self._pressure = Pressure()
        self._spent: dict[Pool, int] = {}
        sizes = receiver.swarm.shape.sizes
        budgets = (
            GrantBudget(1, frames),
            GrantBudget(max(sizes.values()), 2 * sum(sizes.values())),
            GrantBudget(1, frames),
        )
        self._grants = LinkGrants(budgets, ACTIVATIONS + len(sizes), HeldBytes(), self._announce)
        self._lane = self._grants.lane()
        self._announcing = False
        self._announce()

    @property
    def stands(self) -> bool:
        """Whether both ends are still the processes between which it was opened."""
        return self._processes == (self._sender.process, self._receiver.process)

    def send(self, frame: SimFrame) -> None:
        """Queue a tensor; it leaves once it is granted."""
        self._queue.add(frame)
        self._go_on()

    def nudge(self, pool: Pool, word: Callable[[Member], Iterable[Effect]]) -> None:
        """Send `word`, which stands for a repeated activation, if that activation would have to wait."""
        if self._queue.is_short(pool, 1):
            receiver, process = self._receiver, self._processes[1]
            self._carry(lambda: receiver.later(process, word))

    def end_step(self, step: StepId) -> None:
        """Drop the queued tensors of `step`."""
        self._queue.forget(step)
        self._go_on()

    def _go_on(self) -> None:
        while (frame := self._queue.next()) is not None:
            if frame.cost:
                self._spent[frame.pool] = self._spent.get(frame.pool, 0) + frame.cost
            self._leave(frame, dict(self._spent))
        if self._pressure.judge(self._queue.pools, 0, 0, 0.0):
            peer, blocks = self._receiver.name, self._pressure.held
            self._sender.later(self._processes[0], lambda core: core.work.congested(peer, blocks))

    def _leave(self, frame: SimFrame, totals: Mapping[Pool, int]) -> None:
        """Send a granted tensor; on arrival it uses its grant until the receiver releases it."""
        receiver, process = self._receiver, self._processes[1]

        def arrive(core: Member) -> Iterable[Effect]:
            self._lane.offered(totals)
            self._lane.claim(frame.pool, frame.cost)
            handle = receiver.boxes.new(frame.tag, frame.value, self._sender.name)
            receiver.boxes.lend(handle, self._lane.settle(frame.pool, frame.cost))
            return frame.take(core, handle)

        self._carry(lambda: receiver.later(process, arrive))

    def _carry(self, deliver: Callable[[], None]) -> None:
        network = self._sender.swarm.network
        network.send(self._sender.name, self._receiver.name, deliver)

    def _announce(self) -> None:
        """Send the sender its grants soon; several calls make one message."""
        if self._announcing:
            return
        self._announcing = True

        def say() -> None:
            self._announcing = False
            told = self._grants.said()
            sender, process = self._sender, self._processes[0]

            def hear(_core: Member) -> Iterable[Effect]:
                self._queue.granted(*told)
                self._go_on()
                return ()

            sender.swarm.network.send(self._receiver.name, sender.name, lambda: sender.later(process, hear))

        self._sender.swarm.world.after(0.0, say)
