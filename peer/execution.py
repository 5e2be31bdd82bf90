"""Carries out the step effects that need the compute worker, and answers the core.

Each method posts its command at once, so that the worker sees commands in the order of the effects, and returns a
coroutine that waits for the answer. What a command reads or writes stays pinned until it is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member import Effect, Member
from hetpeer.bootstrap.manifest import Manifest
from hetpeer.peer.tensors import Tensor, TensorStore
from hetpeer.stages.data.order import sample_offsets
from hetpeer.stages.data.tokens import TokenShards
from hetpeer.stages.execution import commands as c
from hetpeer.stages.execution import effects as p
from hetpeer.stages.execution.arena import Extent
from hetpeer.stages.execution.bundles import BundleLayout
from hetpeer.stages.execution.compute import Compute
from hetpeer.stages.execution.results import CommandFailedError
from hetpeer.stages.graph.spec import BlockSpec

FLOAT_BYTES = 4
R = TypeVar("R")
Answer = Coroutine[Any, Any, None]
"""To be run as a task: it waits for the worker and tells the core. The command itself is posted already."""


class DataSource:
    """Microbatches as the data order defines them."""

    def __init__(self, manifest: Manifest, train: TokenShards, heldout: TokenShards) -> None:
        self._manifest = manifest
        self._train = train
        self._heldout = heldout

    def microbatch(
        self, step: int, number: int
    ) -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
        """`tokens` and `targets`, each [microbatch_size, sequence_length] int64; held-out ids start at M."""
        training, length = self._manifest.training, self._manifest.data.sequence_length
        held_out = number >= training.microbatches
        shards = self._heldout if held_out else self._train
        offsets = sample_offsets(
            self._manifest.seed,
            "evaluation" if held_out else "train",
            step,
            number - training.microbatches if held_out else number,
            training.microbatch_size,
            shards.population(length),
        )
        tokens, targets = shards.batch(offsets, length)
        return {"tokens": tokens, "targets": targets}


class Execution:
    """The worker's side of one place: `specs` are the blocks held here, in order."""

    def __init__(
        self,
        compute: Compute,
        store: TensorStore,
        specs: Sequence[BlockSpec],
        data: DataSource | None,
        manifest: Manifest,
        answer: Callable[[Sequence[Effect]], None],
    ) -> None:
        self._compute = compute
        self._store = store
        self._specs = {spec.index: spec for spec in specs}
        self._data = data
        self._manifest = manifest
        self._answer = answer
        self._data_tensors: dict[tuple[e.StepId, p.TaskKey], list[Tensor]] = {}

    def input_layout(self, block: int, *, gradients: bool = False) -> BundleLayout:
        """Of the bundle that enters `block`, which is held here."""
        return BundleLayout.of(self._specs[block].inputs, gradients=gradients)

    def output_layout(self, end: int, *, gradients: bool = False) -> BundleLayout:
        """Of the bundle that leaves block `end`-1, which is held here."""
        return BundleLayout.of(self._specs[end - 1].outputs, gradients=gradients)

    def elements(self, block: int) -> int:
        """Length of the block's flat gradient."""
        return self._specs[block].parameter_count

    def holds(self, block: int) -> bool:
        return block in self._specs

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def forward(self, member: Member, step: e.StepId, work: p.RunForward) -> Answer:
        """`RunForward` → `Member.forward_done` or `Member.work_failed`."""
        key, last = work.key, self._specs[work.end - 1]
        source = work.source if isinstance(work.source, Tensor) else None
        layout = BundleLayout.of({}) if last.loss is not None else self.output_layout(work.end)
        output = None if last.loss is not None else self._store.new(step, layout.nbytes)
        data = self._load_data(step, key, work.end)
        command = c.Forward(
            task=_name(key),
            begin=key.begin,
            end=work.end,
            inputs={} if source is None else self.input_layout(key.begin).within(source.extent),
            data={name: tensor.extent for name, tensor in data.items()},
            outputs={} if output is None else layout.within(output.extent),
            train=work.train,
        )
        posted = self._post(command, [source, output, *data.values()])

        async def answer() -> None:
            try:
                done = await posted
            except CommandFailedError as error:
                self._drop_data(step, key)
                self._answer(member.work_failed(step, key, error.what))
                return
            if not work.train:
                self._drop_data(step, key)
            self._answer(member.forward_done(step, key, output, done.loss))

        return answer()

    def backward(self, member: Member, step: e.StepId, work: p.RunBackward) -> Answer:
        """`RunBackward` → `Member.backward_done` or `Member.work_failed`."""
        key = work.key
        gradient = work.gradient if isinstance(work.gradient, Tensor) else None
        layout = self.input_layout(key.begin, gradients=True)
        back = self._store.new(step, layout.nbytes) if key.begin > 0 else None
        given = (
            {} if gradient is None else self.output_layout(work.end, gradients=True).within(gradient.extent)
        )
        command = c.Backward(
            task=_name(key),
            output_gradients=given,
            input_gradients={} if back is None else layout.within(back.extent),
            weight=1.0 / self._manifest.training.microbatches,
            slot=work.slot,
            fold=work.fold,
        )
        posted = self._post(command, [gradient, back])

        async def answer() -> None:
            try:
                await posted
            except CommandFailedError as error:
                self._answer(member.work_failed(step, key, error.what))
                return
            finally:
                self._drop_data(step, key)
            self._answer(member.backward_done(step, key, back))

        return answer()

    def _load_data(self, step: e.StepId, key: p.TaskKey, end: int) -> dict[str, Tensor]:
        """The author's inputs that the blocks [key.begin, end) use."""
        names = {name for block in range(key.begin, end) for name in self._specs[block].data}
        if not names or self._data is None:
            return {}
        arrays = self._data.microbatch(step.number, key.id)
        tensors: dict[str, Tensor] = {}
        for name in sorted(names):
            tensors[name] = self._store.new(step, arrays[name].nbytes)
            self._store.view(tensors[name])[:] = arrays[name].reshape(-1).view(np.uint8).data
        self._data_tensors[step, key] = list(tensors.values())
        return tensors

    def end_step(self, step: e.StepId) -> None:
        """Microbatches of `step` whose backward never came are forgotten; their tensors end with the step."""
        for key in [key for key in self._data_tensors if key[0] == step]:
            del self._data_tensors[key]

    def _drop_data(self, step: e.StepId, key: p.TaskKey) -> None:
        for tensor in self._data_tensors.pop((step, key), ()):
            self._store.release(tensor)

    # ── reduce and apply ─────────────────────────────────────────────────────────────────────────────────────────

    def export(self, step: e.StepId, shard: e.Shard, slot: int, then: Callable[[Tensor], None]) -> Answer:
        """`then` gets our slot's elements of `shard`."""
        piece = self._store.new(step, (shard.end - shard.begin) * FLOAT_BYTES)
        command = c.ExportSlot(
            block=shard.block, slot=slot, begin=shard.begin, end=shard.end, extent=piece.extent
        )
        posted = self._post(command, [piece])

        async def answer() -> None:
            await posted
            if not piece.released:  # the step may be over meanwhile
                then(piece)

        return answer()

    def sum(self, member: Member, step: e.StepId, work: e.SumParts) -> Answer | None:
        """`SumParts` → `Member.summed`. Parts of another length are not summed: the plan then times out."""
        shard = work.shard
        elements = shard.end - shard.begin
        parts = [part for part in work.parts if isinstance(part, Tensor)]
        if any(part.extent.nbytes != elements * FLOAT_BYTES for part in parts):
            return None
        single = len(parts) == 1  # its own sum: nothing is added to zeros
        total = self._store.share(parts[0]) if single else self._store.new(step, elements * FLOAT_BYTES)
        command = c.Sum(parts=tuple(p.extent for p in parts), into=total.extent, elements=elements)
        posted = None if single else self._post(command, [*parts, total])

        async def answer() -> None:
            if posted is not None:
                await posted
            self._answer(member.summed(step, shard, total))

        return answer()

    def inspect(self, member: Member, step: e.StepId, work: e.Inspect) -> Answer | None:
        """`Inspect` → `Member.inspected`: shards are joined into the block's whole gradient."""
        elements = self.elements(work.block)
        shards = [shard for shard in work.shards if isinstance(shard, Tensor)]
        if sum(shard.extent.nbytes for shard in shards) != elements * FLOAT_BYTES:
            return None
        gradient = shards[0] if len(shards) == 1 else self._join(step, shards, elements)
        posted = self._post(c.Inspect(extent=gradient.extent, elements=elements), [gradient])

        async def answer() -> None:
            seen = await posted
            vote = m.BlockVote(
                block=work.block, digest=seen.digest, squared_norm=seen.squared_norm, finite=seen.finite
            )
            self._answer(member.inspected(step, work.plan, vote, gradient))

        return answer()

    def _join(self, step: e.StepId, shards: Sequence[Tensor], elements: int) -> Tensor:
        gradient = self._store.new(step, elements * FLOAT_BYTES)
        view, offset = self._store.view(gradient), 0
        for shard in shards:
            view[offset : offset + shard.extent.nbytes] = self._store.view(shard)
            offset += shard.extent.nbytes
        return gradient

    def apply(self, member: Member, step: e.StepId, work: e.ApplyUpdate) -> Answer:
        """`ApplyUpdate` → `Member.applied`."""
        assert isinstance(work.gradient, Tensor)
        command = c.Apply(block=work.block, gradient=work.gradient.extent, coefficient=work.coefficient)
        posted = self._post(command, [work.gradient])

        async def answer() -> None:
            done = await posted
            self._answer(member.applied(step, work.block, done.digest))

        return answer()

    def dump(self, block: int, room: int) -> Coroutine[Any, Any, bytes]:
        """The state file of a block as it is when the worker comes to it, after all that was posted before."""
        extent: Extent = self._compute.arena.allocate(room)
        posted = self._compute.post(c.DumpState(block=block, extent=extent))

        async def copy() -> bytes:
            try:
                dumped = await posted
                return bytes(self._compute.arena.view(extent)[: dumped.nbytes])
            finally:
                self._compute.arena.release(extent)

        # Whoever asked may give up; the worker writes all the same, and the extent must be ours until it has.
        return _shielded(asyncio.ensure_future(copy()))

    def command(self, command: c.Command[Any]) -> Answer:
        """Post a command that touches no tensor of ours and has nothing to tell."""
        posted = self._compute.post(command)

        async def answer() -> None:
            await posted

        return answer()

    def _post(self, command: c.Command[R], tensors: Iterable[Tensor | None]) -> Coroutine[Any, Any, R]:
        """Post `command`; `tensors` stay in place until it is answered."""
        pinned = self._store.pin(t for t in tensors if t is not None)
        posted = self._compute.post(command)

        async def answer() -> R:
            try:
                return await posted
            finally:
                self._store.unpin(pinned)

        return answer()


async def _shielded(future: asyncio.Future[R]) -> R:
    return await asyncio.shield(future)


def _name(key: p.TaskKey) -> str:
    return f"{key.id}/{key.begin}"
