"""Commands to the compute worker whose tensors stay in place until they are answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from hetpeer.dht.base.runtime import going_on
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.command import Command, WorkerLane
from hetpeer.stages.ipc.compute import Compute

R = TypeVar("R")
Answer = Coroutine[Any, Any, None]
"""Waits for the worker's answer and tells the core; to be run as a task. The command itself is posted
already.
"""


class WorkerPosts:
    """The way to the worker for those who carry out a step's effects."""

    def __init__(self, compute: Compute, store: TensorStore, trace: Trace) -> None:
        self.store = store
        self._compute = compute
        self._trace = trace
        self._idle_since: dict[WorkerLane, float] = defaultdict(float)

    def post(self, command: Command[R], tensors: Iterable[Tensor | None]) -> Coroutine[Any, Any, R]:
        """Post `command` at once; `tensors` stay in place until it is answered."""
        pinned = self.store.pin(t for t in tensors if t is not None)
        posted = self._post(command)

        async def answer() -> R:
            try:
                return await posted
            finally:
                self.store.unpin(pinned)

        return answer()

    def _post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        posted = self._compute.post(command)
        return self._traced(command, posted, self._trace.now()) if self._trace.on else posted

    async def _traced(self, command: Command[R], posted: Coroutine[Any, Any, R], at: float) -> R:
        """Trace a command. A lane does one at a time: it began when it was posted, or when the one before was
        done.
        """
        try:
            return await posted
        finally:
            lane = command.lane
            began, self._idle_since[lane] = max(at, self._idle_since[lane]), self._trace.now()
            more = _extent(command) if isinstance(command, c.Forward) else {}
            self._trace.span(lane.value, _label(command), began, **more)

    def command(self, command: Command[Any]) -> Answer:
        """Post a command that touches no tensor of ours and has nothing to tell."""
        posted = self._post(command)

        async def answer() -> None:
            await posted

        return answer()

    def dump(self, block: int, room: int) -> Coroutine[Any, Any, bytes]:
        """Bytes of the state file of a block, after everything that was posted before."""
        extent: Extent = self._compute.arena.allocate(room)
        posted = self._post(c.DumpState(block=block, extent=extent))

        async def copy() -> bytes:
            try:
                dumped = await posted
                return bytes(self._compute.arena.view(extent)[: dumped.nbytes])
            finally:
                self._compute.arena.release(extent)

        # The caller may give up; the worker writes all the same, and the extent must be ours until it has.
        return going_on(copy())


def _extent(command: c.Forward) -> dict[str, Any]:
    """The size of a forward, so that work that was not counted can be told from work that was."""
    return {"blocks": command.end - command.begin, "train": command.train}


def _label(command: Command[Any]) -> str:
    about = getattr(command, "task", getattr(command, "block", ""))
    return f"{type(command).__name__} {about}".strip()
