"""Work that passes from device to device: the parts of a forward or backward, one for each segment.

A forward of a divided place runs on the first device, then on the next; a backward runs the other way. Each
part reads what the one before has written into the arena. So while one device is at a microbatch, the others
are at others.

Gradients are added on each device in the order in which backwards were posted, whatever their blocks: the
coordinator is told that order, and a replay adds in it. All devices see backwards in one order, so none waits
for itself.

A part that fails ends its work: the answer is that failure, and later parts are never sent. Parts before it
were carried out. The pipeline core knows that a failed backward spoils its slot, and drops all of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from hetpeer.stages.ipc.block_commands import (
    Backward,
    ClearStep,
    DropSlot,
    Forward,
    LoadState,
    PrepareBlock,
    Unload,
)
from hetpeer.stages.ipc.worker_messages import Command, CommandFailed, Result

R = TypeVar("R")
Ask = Callable[[int, Command[Any]], asyncio.Future[Result]]
"""Sends a command to the device with this index."""


@dataclass(frozen=True, slots=True)
class Part(Generic[R]):
    """`command` for the device that has `block`."""

    block: int
    command: Command[R]


@dataclass(frozen=True, slots=True)
class InSegments(Generic[R]):
    """A piece of work in parts, in the order in which they are carried out; `join` makes their one answer."""

    parts: tuple[Part[R], ...]
    join: Callable[[Sequence[R]], R]


@dataclass(eq=False, slots=True)
class _UnderWay:
    """Work whose parts are not all answered."""

    left: deque[tuple[int, Command[Any]]]
    """(device, command) of the parts that are not sent yet."""
    answer: asyncio.Future[list[Result]]
    done: list[Result] = field(default_factory=list)
    running: bool = False
    """Whether a part is at its device."""
    over: bool = False
    """Whether it was called off: it ends with the part that is running."""


class SegmentedWork:
    """All work under way on `devices` many devices."""

    def __init__(self, devices: int, ask: Ask) -> None:
        self._ask = ask
        self._under_way: dict[_UnderWay, None] = {}
        self._orders: list[deque[_UnderWay]] = [deque() for _ in range(devices)]
        """For each device the backwards that have a part to come there, in the order of posting."""

    def post(self, parts: Iterable[tuple[int, Command[Any]]]) -> asyncio.Future[list[Result]]:
        """Begin work: the device and the command of each part. The future has their answers.

        The last of them is a `CommandFailed` if a part failed. The future fails if a worker dies. It may be
        dropped.
        """
        work = _UnderWay(deque(parts), asyncio.get_running_loop().create_future())
        self._under_way[work] = None
        for device, command in work.left:
            if isinstance(command, Backward):
                self._orders[device].append(work)
        self._go_on()
        return work.answer

    def heed(self, command: Command[Any]) -> None:
        """Take in a command that is about to be sent: parts to come must not undo what it does."""
        match command:
            case ClearStep(step=step):
                self._call_off(lambda part: part.step == step)
            case Unload(block=block) | PrepareBlock(block=block) | LoadState(block=block):
                self._call_off(lambda part: isinstance(part, Forward) and part.begin <= block < part.end)
            case DropSlot(step=step, block=block, slot=slot):
                for work in self._under_way:
                    work.left = deque((at, _without(part, step, block, slot)) for at, part in work.left)

    def _call_off(self, concerns: Callable[[Any], bool]) -> None:
        """End work of which a part to come `concerns` what is over."""
        for work in [work for work in self._under_way if any(concerns(part) for _, part in work.left)]:
            work.left.clear()
            work.over = True
            self._leave_orders(work)
            if not work.running:  # else its tensors are in use until that part is answered
                self._end(work, [*work.done, CALLED_OFF])
        self._go_on()

    def _go_on(self) -> None:
        """Send each part whose turn it is."""
        for work in list(self._under_way):
            if work.left and not work.running and self._in_turn(work):
                device, command = work.left.popleft()
                if isinstance(command, Backward):
                    self._orders[device].popleft()
                work.running = True
                self._ask(device, command).add_done_callback(partial(self._answered, work))

    def _in_turn(self, work: _UnderWay) -> bool:
        device, command = work.left[0]
        return not isinstance(command, Backward) or self._orders[device][0] is work

    def _answered(self, work: _UnderWay, answer: asyncio.Future[Result]) -> None:
        work.running = False
        if (error := answer.exception()) is not None:
            self._end(work, error)
        else:
            work.done += [answer.result(), CALLED_OFF] if work.over else [answer.result()]
            if isinstance(work.done[-1], CommandFailed) or not work.left:
                self._end(work, work.done)
        self._go_on()

    def _leave_orders(self, work: _UnderWay) -> None:
        for order in self._orders:
            if work in order:
                order.remove(work)

    def _end(self, work: _UnderWay, outcome: list[Result] | BaseException) -> None:
        del self._under_way[work]
        self._leave_orders(work)
        if work.answer.done():  # its caller was cancelled
            return
        if isinstance(outcome, BaseException):
            work.answer.set_exception(outcome)
            work.answer.exception()  # if its caller was cancelled, nobody retrieves it, and that is no error
        else:
            work.answer.set_result(outcome)


CALLED_OFF = CommandFailed(
    code="HP-WORK-001",
    what="the work was called off",
    why="its step or its place is over",
    fix="nothing: what is still to be done is done again",
)


def _without(part: Command[Any], step: int, block: int, slot: int) -> Command[Any]:
    """`part`, which adds nothing to that slot of `block`."""
    if isinstance(part, Backward) and (part.step, part.slot) == (step, slot):
        return replace(part, fold=tuple(one for one in part.fold if one != block))
    return part
