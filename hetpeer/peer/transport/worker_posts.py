"""Commands to the compute worker that read or write tensors of the store, which stay in place meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from hetpeer.dht.base.runtime import going_on
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.transport.exchange import PassingState
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.compute import Compute
from hetpeer.stages.ipc.nameless_file import NamelessFile
from hetpeer.stages.ipc.segmented_work import InSegments
from hetpeer.stages.ipc.worker_messages import Command, WorkerLane
from hetpeer.stages.pipeline.division import Division

R = TypeVar("R")
Answer = Coroutine[Any, Any, None]
"""Waits, as a task, for the worker's answer and tells the core. The command itself is posted already."""


class WorkerPosts:
    """Posts commands to the worker on behalf of a step's effects."""

    def __init__(self, compute: Compute, store: TensorStore, trace: Trace) -> None:
        self.store = store
        self._compute = compute
        self._trace = trace
        self._idle_since: dict[WorkerLane, float] = defaultdict(float)

    @property
    def exchange(self) -> NamelessFile:
        """The file through which states pass."""
        return self._compute.exchange

    @property
    def division(self) -> Division:
        """The place divided among the workers."""
        return self._compute.division

    def refers(self, block: int) -> bool:
        """Whether inputs of `block` stay in use from its forward to its backward."""
        return self._compute.refers(block)

    def post(self, command: Command[R], tensors: Iterable[Tensor | None]) -> Coroutine[Any, Any, R]:
        """Post `command` at once; `tensors` stay in place until it is answered."""
        return self._pinned(self._post(command), tensors)

    def post_segments(self, work: InSegments[R], tensors: Iterable[Tensor | None]) -> Coroutine[Any, Any, R]:
        """Begin work in parts at once; `tensors` stay in place until all of it is answered."""
        command = work.parts[0].command
        return self._pinned(self._traced_if_on(command, self._compute.post_segments(work)), tensors)

    def _pinned(
        self, posted: Coroutine[Any, Any, R], tensors: Iterable[Tensor | None]
    ) -> Coroutine[Any, Any, R]:
        pinned = self.store.pin(t for t in tensors if t is not None)

        async def answer() -> R:
            try:
                return await posted
            finally:
                self.store.unpin(pinned)

        return answer()

    def _post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        return self._traced_if_on(command, self._compute.post(command))

    def _traced_if_on(self, command: Command[R], posted: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R]:
        return self._traced(command, posted, self._trace.now()) if self._trace.on else posted

    async def _traced(self, command: Command[R], posted: Coroutine[Any, Any, R], at: float) -> R:
        """Trace a command. It began when it was posted, or when its lane had done the one before."""
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

    def dump(self, block: int, room: int) -> tuple[PassingState, Coroutine[Any, Any, int]]:
        """The state of a block after everything that was posted before, of at most `room` bytes.

        The coroutine waits until it is written and returns its length; the caller drops the state in any
        case. Raises `StateRoomError`.
        """
        state = PassingState(self._compute.exchange)
        state.begin(room)
        posted = self._post(c.DumpState(block=block, extent=state.extent))

        async def written() -> int:
            try:
                return (await posted).nbytes
            finally:
                state.drop()

        # The caller may give up; the worker writes all the same, and the place must be ours until it has.
        state.use()
        return state, going_on(written())


def _extent(command: c.Forward) -> dict[str, Any]:
    """The size of a forward, so that work that was not counted can be told from work that was."""
    return {"blocks": command.end - command.begin, "train": command.train}


def _label(command: Command[Any]) -> str:
    about = getattr(command, "task", getattr(command, "block", ""))
    return f"{type(command).__name__} {about}".strip()
