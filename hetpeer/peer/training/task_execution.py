"""The place that a volunteer holds, and the execution of a step's tasks there by the compute worker.

Each method posts its command at once, so that the worker sees commands in the order of the effects, and
returns a coroutine that waits for the answer and tells the core. Tensors that a command reads or writes stay
pinned until it is answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetpeer.averaging import effects as e
from hetpeer.averaging.effects import Effect
from hetpeer.averaging.member.member import Member
from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.streams.abuse import Offence, OffenceError
from hetpeer.peer.preparation.data_source import DataSource
from hetpeer.peer.training.task_segments import backward_in_segments, forward_in_segments
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.transport.tensor_schema import TensorSchema
from hetpeer.peer.transport.tensor_store import Tensor
from hetpeer.peer.transport.worker_posts import Answer, WorkerPosts
from hetpeer.stages.block.rounding import ROOM
from hetpeer.stages.data.sample_weights import share
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.worker_messages import NO_MEMORY, CommandFailedError
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow


@dataclass(frozen=True, slots=True)
class HeldPlace:
    """The worker's side of one place; a new one is made for each `Prepare`."""

    me: str
    """Our peer id."""
    member: Member
    posts: WorkerPosts
    schema: TensorSchema
    book: LinkBook
    window: InFlightWindow
    """Measures and limits microbatches in flight."""
    data: DataSource | None
    """The author's inputs; None if no block of the place uses any."""
    tasks: TaskSet
    perform: Callable[[Sequence[Effect]], None]
    """Carries out effects of the core."""
    offended: Callable[[str, ProtocolError], None]
    """Counts an offence of a peer."""


NOT_FINITE = "HP-NUM-001"
"""The worker's error code for a tensor with NaN or infinity in it (stages/worker/tensor_staging.py)."""

NEAR = 1 / (4 * ROOM)
"""Share of the tolerance from which on rounding may explain a difference, a fourth of what does."""

_log = logging.getLogger(__name__)


class TaskExecution:
    """The worker's side of the tasks of one place."""

    def __init__(self, place: HeldPlace) -> None:
        self._work = place.member.work
        self._posts = place.posts
        self._store = place.posts.store
        self._schema = place.schema
        self._data = place.data
        self._book = place.book
        self._window = place.window
        self._perform = place.perform
        self._offended = place.offended
        self._sparse: set[tuple[e.StepId, p.TaskKey]] = set()
        """Tasks whose input came through a sparse codec: so do their gradients."""
        self._beside: dict[tuple[e.StepId, p.TaskKey], list[Tensor]] = {}
        """Task → tensors that its graph may refer to: the author's data, bundles between devices."""
        self._told_of_memory = False
        self._weighed: set[tuple[e.StepId, int]] = set()
        """Spot checks of which a microbatch was computed once more, to measure rounding."""
        self._near = False
        """Whether rounding was nearly what the tolerance allows: then it is measured in each microbatch."""

    # ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────

    def forward(self, step: e.StepId, work: p.RunForward) -> Answer:
        """`RunForward` → `forward_done` or `work_failed` of the core's work."""
        key, last = work.key, self._schema.specs[work.end - 1]
        name = task_name(key)
        source = work.source if isinstance(work.source, Tensor) else None
        try:
            data = self._load_data(step, key, work.end)
        except LocalError as error:  # a shard that nobody gives us: another peer may have it
            return self._not_done(step, key, error.what)
        sparse = source is not None and source.sparse
        if sparse and work.train:
            self._sparse.add((step, key))
        layout, batch = self._schema.output_layout(work.end, key.id), self._schema.batch(key.id)
        inputs = {}
        if source is not None:
            inputs = self._schema.input_layout(key.begin, key.id).within(source.extent)
        output = None if last.loss is not None else self._store.new(step, layout.nbytes, kept=True)
        segments = self._posts.division.segments(key.begin, work.end)
        borders = [self._schema.output_layout(end, key.id) for _, end in segments[:-1]]
        between = [self._store.new(step, border.nbytes) for border in borders]
        into = [(begin, tensor) for (begin, _), tensor in zip(segments[1:], between, strict=True)]
        passing = [tensor for begin, tensor in into if not self._posts.refers(begin)]
        self._beside[step, key] = [*data.values(), *(one for one in between if one not in passing)]
        command = c.Forward(
            step=step.number,
            versions=tuple(step.version_of(key.id, block) for block in range(key.begin, work.end)),
            task=name,
            begin=key.begin,
            end=work.end,
            inputs=inputs,
            data={field: tensor.extent for field, tensor in data.items()},
            outputs={} if output is None else layout.within(output.extent),
            batch=batch,
            draw=Draw(self._schema.seed, step.batch, key.id, self._schema.microbatches),
            train=work.train,
            sparse=sparse,
        )
        inside = [border.within(tensor.extent) for border, tensor in zip(borders, between, strict=True)]
        parts = forward_in_segments(command, segments, inside, self._schema.specs)
        posted = self._posts.post_segments(parts, [source, output, *data.values(), *between])
        if work.train and not key.check:
            self._window.begun((step, key), work.hops_after, time.monotonic())

        async def answer() -> None:
            try:
                done = await posted
            except CommandFailedError as error:
                self._store.release_all(self._beside.pop((step, key), ()))
                self._mind_memory(error)
                given = self._blame(error, f"task {task_name(key)}, input", source)
                self._perform(self._work.work_failed(step, key, error.what, given))
                return
            finally:
                self._store.release_all(passing)
            if work.train:
                self._book.computed("forward", done.seconds)
            else:
                self._store.release_all(self._beside.pop((step, key), ()))
            self._perform(self._work.forward_done(step, key, output, done.loss, done.hits))

        return answer()

    async def _not_done(self, step: e.StepId, key: p.TaskKey, why: str) -> None:
        self._perform(self._work.work_failed(step, key, why))

    def backward(self, step: e.StepId, work: p.RunBackward) -> Answer:
        """`RunBackward` → `backward_done` or `work_failed` of the core's work."""
        key = work.key
        gradient = work.gradient if isinstance(work.gradient, Tensor) else None
        layout = self._schema.input_layout(key.begin, key.id, gradients=True)
        back = self._store.new(step, layout.nbytes, kept=True) if key.begin > 0 else None
        if back is not None:
            back.sparse = (step, key) in self._sparse
        leaving = self._schema.output_layout(work.end, key.id, gradients=True)
        given = {} if gradient is None else leaving.within(gradient.extent)
        weigh = bool(key.check) and (self._near or (step, key.check) not in self._weighed)
        if weigh:
            self._weighed.add((step, key.check))
        command = c.Backward(
            step=step.number,
            task=task_name(key),
            output_gradients=given,
            input_gradients={} if back is None else layout.within(back.extent),
            weight=self._share(step, key.id),
            slot=work.slot,
            fold=work.fold,
            weigh=weigh,
        )
        segments = self._posts.division.segments(key.begin, work.end)
        borders = [self._schema.output_layout(end, key.id, gradients=True) for _, end in segments[:-1]]
        between = [self._store.new(step, border.nbytes) for border in borders]
        inside = [border.within(tensor.extent) for border, tensor in zip(borders, between, strict=True)]
        posted = self._posts.post_segments(
            backward_in_segments(command, segments, inside), [gradient, back, *between]
        )

        async def answer() -> None:
            try:
                done = await posted
            except CommandFailedError as error:
                self._mind_memory(error)
                given = self._blame(error, f"task {task_name(key)}, gradient of output", gradient)
                self._perform(self._work.work_failed(step, key, error.what, given))
                return
            finally:
                self._store.release_all([*self._beside.pop((step, key), ()), *between])
            self._book.computed("backward", done.seconds)
            if weigh:
                self._near = done.rounding.relative > NEAR * self._schema.tolerance
            if not key.check:
                self._window.finished((step, key), time.monotonic())
            self._perform(self._work.backward_done(step, key, back, done.rounding))

        return answer()

    def _share(self, step: e.StepId, microbatch: int) -> float:
        """Share of the microbatch's mean loss in that of `step`."""
        given = self._work.weights(step)
        sizes = [self._schema.batch(number) for number in range(self._schema.microbatches)]
        return share(given if len(given) == len(sizes) else sizes, microbatch)

    def _mind_memory(self, error: CommandFailedError) -> None:
        """Log once that memory was short: others do the task, and the place may be too large."""
        if error.code == NO_MEMORY and not self._told_of_memory:
            self._told_of_memory = True
            _log.warning("a microbatch is left to others, as may be more of them: %s", error)

    def _blame(self, error: CommandFailedError, what: str, given: Tensor | None) -> str:
        """The sender of `given` if that tensor is at fault, else empty: honest peers' workers refuse NaN."""
        if given is None or error.code != NOT_FINITE or not error.what.startswith(f"{what}: "):
            return ""
        if given.sender:
            wrong = OffenceError(Offence.NOT_FINITE, "numbers that are not finite", peer=given.sender)
            self._offended(given.sender, wrong)
        return given.sender

    def _load_data(self, step: e.StepId, key: p.TaskKey, end: int) -> dict[str, Tensor]:
        """The author's inputs that the blocks [key.begin, end) use."""
        names = {name for block in range(key.begin, end) for name in self._schema.specs[block].data}
        if not names or self._data is None:
            return {}
        arrays = self._data.microbatch(step.batch, key.id)
        tensors: dict[str, Tensor] = {}
        for name in sorted(names):
            tensors[name] = self._store.put(step, arrays[name].reshape(-1).view(np.uint8).data)
        return tensors

    def end_step(self, step: e.StepId) -> None:
        """Microbatches of `step` whose backward never came are forgotten; their tensors end with the step."""
        for key in [key for key in self._beside if key[0] == step]:
            del self._beside[key]
        self._sparse = {key for key in self._sparse if key[0] != step}
        self._weighed = {check for check in self._weighed if check[0] != step}
        self._window.end_step(step)


def task_name(key: p.TaskKey) -> str:
    """The name of a task at the worker."""
    return f"{key.id}/{key.begin}" + (f"/{key.check}" if key.check else "")
