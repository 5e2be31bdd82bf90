"""The worker's mind: blocks, kept graphs and slots, changed by one command at a time.

No socket and no process here: `Engine.execute(command) -> result` may be called from anywhere, which is what tests do.
A command that cannot be done is answered by `Failed` and has changed nothing. Only a broken GPU context gets through
as an exception, for nothing can be computed after it: the process ends and the daemon starts another.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from blake3 import blake3

from hetpeer.dht.errors import HetpeerError
from hetpeer.stages.execution import commands as c
from hetpeer.stages.execution import device as devices
from hetpeer.stages.execution import results as r
from hetpeer.stages.execution.arena import SharedMemory
from hetpeer.stages.execution.block import run_range
from hetpeer.stages.execution.groups import MakeRule, Segment, segments
from hetpeer.stages.execution.held import HeldBlock, dump_bytes
from hetpeer.stages.execution.numerics import is_finite, squared_norm
from hetpeer.stages.execution.rehearsal import rehearse
from hetpeer.stages.execution.staging import CommandError, Staging, refuse_not_finite
from hetpeer.stages.execution.state import dump, layout_of, load
from hetpeer.stages.execution.transcoding import Transcoder
from hetpeer.stages.graph.passes import Pass
from hetpeer.stages.graph.spec import BlockSpec, TensorSpec
from hetpeer.stages.graph.wire import Limits, read_block
from hetpeer.stages.links.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A block without its state."""

    spec: BlockSpec
    buffers: Mapping[str, torch.Tensor]
    rules: Sequence[Segment]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A microbatch between its forward and its backward."""

    held: Sequence[HeldBlock]
    here: Pass
    first: BlockSpec
    last: BlockSpec
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    loss: torch.Tensor | None
    sparse: bool


class Engine:
    """All that the worker holds on one device."""

    def __init__(self, device: torch.device, memory: SharedMemory, make_rule: MakeRule) -> None:
        self._device = device
        self._staging = Staging(memory, device)
        self._transcoder = Transcoder(self._staging)
        self._make_rule = make_rule
        self._prepared: dict[int, _Prepared] = {}
        self._blocks: dict[int, HeldBlock] = {}
        self._tasks: dict[str, _Task] = {}
        self._handlers: Mapping[type, Callable[[Any], r.Result]] = {
            c.Prepare: self._prepare,
            c.Load: self._load,
            c.Unload: self._unload,
            c.Forward: self._forward,
            c.Encode: self._encode,
            c.Decode: self._decode,
            c.Backward: self._backward,
            c.DropTask: self._drop_task,
            c.MergeSlot: self._merge_slot,
            c.DropSlot: self._drop_slot,
            c.ExportSlot: self._export_slot,
            c.ClearStep: self._clear_step,
            c.Sum: self._sum,
            c.Inspect: self._inspect,
            c.Apply: self._apply,
            c.DumpState: self._dump_state,
            c.WarmUp: self._warm_up,
            c.Rehearse: self._rehearse,
            c.Info: self._info,
            c.Shutdown: lambda _: r.Done(),
        }

    def execute(self, command: c.Command[Any]) -> r.Result:
        """Carry out one command. Raises torch.AcceleratorError alone: the GPU context is lost."""
        try:
            return self._handlers[type(command)](command)
        except torch.AcceleratorError:
            raise
        except HetpeerError as error:
            if isinstance(error.__cause__, torch.AcceleratorError):
                raise error.__cause__ from error
            return r.failed(error)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return r.Failed(code="HP-MEM-002", what="the compute worker is out of memory", why=_line(error))
        except Exception as error:  # noqa: BLE001 - kernels raise what they like, and one task must not end the worker
            return r.Failed(code="HP-WORK-002", what=f"{type(command).__name__} failed", why=_line(error))

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self, command: c.Prepare) -> r.Prepared:
        spec = read_block(command.graph, Limits())
        if spec.index != command.block:
            raise CommandError(f"the graph of block {command.block} says it is block {spec.index}")
        buffers = self._staging.read(f"block {spec.index}", spec.buffer_specs, command.buffers)
        own = {name: buffer.clone() for name, buffer in buffers.items()}  # the daemon releases the extents
        rules = segments(spec, command.update, command.groups, self._make_rule)
        self._forget(spec.index)
        self._prepared[spec.index] = _Prepared(spec=spec, buffers=own, rules=rules)
        return r.Prepared(dump_bytes=dump_bytes(spec))

    def _load(self, command: c.Load) -> r.Loaded:
        prepared = self._ready_for_state(command.block)
        spec = prepared.spec
        state = load(bytes(self._staging.raw(command.state)), spec.index, layout_of(spec))
        held = HeldBlock(spec, prepared.buffers, state, prepared.rules, self._device)
        self._forget(spec.index)
        self._blocks[spec.index] = held
        return r.Loaded(version=held.version, digest=held.state().digest())

    def _ready_for_state(self, block: int) -> _Prepared:
        if block not in self._prepared:
            raise CommandError(f"block {block} is not prepared")
        return self._prepared[block]

    def _unload(self, command: c.Unload) -> r.Done:
        self._prepared.pop(command.block, None)
        self._transcoder.forget()
        self._forget(command.block)
        return r.Done()

    def _forget(self, block: int) -> None:
        """Drop a block's state, and with it the graphs that were made of it."""
        self._blocks.pop(block, None)
        self._forget_tasks(block)

    def _forget_tasks(self, block: int) -> None:
        over = [task for task, kept in self._tasks.items() if any(h.spec.index == block for h in kept.held)]
        for task in over:
            del self._tasks[task]

    def _held(self, block: int) -> HeldBlock:
        if block not in self._blocks:
            raise CommandError(f"block {block} is not loaded")
        return self._blocks[block]

    def _apply(self, command: c.Apply) -> r.Applied:
        held = self._held(command.block)
        gradient = self._staging.floats(command.gradient, held.spec.vector_count)
        refuse_not_finite(f"block {command.block}", {"gradient": gradient})
        self._forget_tasks(command.block)
        try:
            held.update(gradient.to(self._device), command.coefficient, command.microbatches)
        except BaseException:
            self._forget(command.block)  # half updated: of no version
            raise
        return r.Applied(version=held.version, digest=held.state().digest())

    def _dump_state(self, command: c.DumpState) -> r.Dumped:
        held = self._held(command.block)
        data = dump(held.state(), command.block, layout_of(held.spec))
        place = self._staging.raw(command.extent)
        if len(data) > len(place):
            raise CommandError(
                f"the state of block {command.block} takes {len(data)} bytes, not {len(place)}"
            )
        place[: len(data)] = data
        return r.Dumped(nbytes=len(data))

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self, command: c.Forward) -> r.Forwarded:
        started = time.perf_counter()
        where = f"task {command.task}"
        held = [self._held(block) for block in range(command.begin, command.end)]
        if not held:
            raise CommandError(f"{where} runs no block")
        first, last = held[0].spec.at(command.batch), held[-1].spec.at(command.batch)
        here = Pass(command.draw if command.train else None)
        inputs = self._staging.read(f"{where}, input", first.inputs, command.inputs)
        refuse_not_finite(f"{where}, input", inputs)
        data_specs = {name: spec for one in held for name, spec in one.spec.at(command.batch).data.items()}
        data = self._staging.read(f"{where}, data", data_specs, command.data)
        for name, spec in first.inputs.items():
            inputs[name].requires_grad_(command.train and spec.grad)
        with torch.set_grad_enabled(command.train):
            outputs = run_range([one.block for one in held], inputs, data, command.batch, here)
        loss = outputs.pop(last.loss) if last.loss is not None else None
        specs = {name: spec for name, spec in last.outputs.items() if name != last.loss}
        self._staging.write(f"{where}, output", specs, command.outputs, outputs)
        if loss is not None:
            refuse_not_finite(where, {"loss": loss})
        if command.train:
            self._tasks[command.task] = _Task(
                held=held,
                here=here,
                first=first,
                last=last,
                inputs=inputs,
                outputs=outputs,
                loss=loss,
                sparse=command.sparse,
            )
        value = None if loss is None else loss.item()
        return r.Forwarded(loss=value, seconds=time.perf_counter() - started)

    def _backward(self, command: c.Backward) -> r.Backpropagated:
        started = time.perf_counter()
        where = f"task {command.task}"
        task = self._tasks.pop(command.task, None)
        if task is None:
            raise CommandError(f"no graph is kept of {where}")
        folded = [held for held in task.held if held.spec.index in command.fold]
        if len(folded) != len(command.fold):
            raise CommandError(f"{where} did not run all of the blocks {list(command.fold)}")
        roots, seeds = self._seeds(where, task, command)
        specs = _with_gradient(task.first.inputs)
        leaves = [task.inputs[name] for name in specs]
        leaves += [leaf for held in folded for leaf in held.parameters.values()]
        found = iter(torch.autograd.grad(roots, leaves, seeds, allow_unused=True) if leaves else ())
        inputs = {name: next(found) for name in specs}
        gradients = [{name: next(found) for name in held.parameters} for held in folded]
        for held, parts in zip(folded, gradients, strict=True):
            given = {name: part for name, part in parts.items() if part is not None}
            refuse_not_finite(f"{where}, gradient of block {held.spec.index}", given)
        rooms = [held.room(command.slot) for held in folded]  # the last step that may fail for want of memory
        back = {
            name: torch.zeros_like(task.inputs[name]) if part is None else part
            for name, part in inputs.items()
        }
        if task.sparse:
            back = {name: part.where(task.inputs[name] != 0, 0.0) for name, part in back.items()}
        self._staging.write(f"{where}, gradient of input", specs, command.input_gradients, back)
        for held, room, parts in zip(folded, rooms, gradients, strict=True):
            held.fold(command.slot, room, parts, task.here)
        return r.Backpropagated(seconds=time.perf_counter() - started)

    def _seeds(
        self, where: str, task: _Task, command: c.Backward
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the backward pass starts from, and the gradients there."""
        if task.loss is not None:
            return [task.loss], [torch.full_like(task.loss, command.weight)]
        specs = _with_gradient(task.last.outputs)
        given = self._staging.read(f"{where}, gradient of output", specs, command.output_gradients)
        refuse_not_finite(f"{where}, gradient of output", given)
        return [task.outputs[name] for name in specs], list(given.values())

    def _drop_task(self, command: c.DropTask) -> r.Done:
        self._tasks.pop(command.task, None)
        return r.Done()

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _encode(self, command: c.Encode) -> r.Encoded:
        written, nbytes = self._transcoder.encode(
            Codec.of(command.codec),
            command.share,
            command.tensors,
            command.into,
            squeeze=command.squeeze,
            feedback=command.feedback,
        )
        return r.Encoded(nbytes=nbytes, written=written)

    def _decode(self, command: c.Decode) -> r.Done:
        self._transcoder.decode(Codec.of(command.codec), command.written, command.data, command.tensors)
        return r.Done()

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _merge_slot(self, command: c.MergeSlot) -> r.Done:
        self._held(command.block).merge_slot(command.source, command.target)
        return r.Done()

    def _drop_slot(self, command: c.DropSlot) -> r.Done:
        self._held(command.block).drop_slot(command.slot)
        return r.Done()

    def _export_slot(self, command: c.ExportSlot) -> r.Done:
        vector = self._held(command.block).slot(command.slot)
        if not command.begin <= command.end <= len(vector):
            raise CommandError(
                f"a slot of {len(vector)} elements has no part [{command.begin}, {command.end})"
            )
        part = vector[command.begin : command.end]
        self._staging.floats(command.extent, len(part)).copy_(part)
        return r.Done()

    def _clear_step(self, _: c.ClearStep) -> r.Done:
        self._tasks.clear()
        for held in self._blocks.values():
            held.clear_slots()
        return r.Done()

    # ── gradients in the arena ───────────────────────────────────────────────────────────────────────────────────

    def _sum(self, command: c.Sum) -> r.Done:
        if command.into in command.parts[1:]:
            raise CommandError("a sum would overwrite one of its later parts")
        into = self._staging.floats(command.into, command.elements)
        first, *others = [self._staging.floats(part, command.elements) for part in command.parts]
        into.copy_(first)
        for part in others:
            into.add_(part)
        return r.Done()

    def _inspect(self, command: c.Inspect) -> r.Inspected:
        vector = self._staging.floats(command.extent, command.elements)
        norm = math.fsum(squared_norm(vector[begin:end]) for begin, end in command.normed)
        digest = blake3(vector.numpy().data.cast("B")).hexdigest()
        return r.Inspected(digest=digest, squared_norm=norm, finite=is_finite(vector))

    # ── the worker itself ────────────────────────────────────────────────────────────────────────────────────────

    def _warm_up(self, _: c.WarmUp) -> r.WarmedUp:
        return r.WarmedUp(flops_per_second=devices.measure_flops(self._device))

    def _rehearse(self, command: c.Rehearse) -> r.Rehearsed:
        prepared = self._ready_for_state(command.block)
        return r.Rehearsed(seconds=rehearse(prepared.spec, prepared.buffers, self._device))

    def _info(self, _: c.Info) -> r.WorkerInfo:
        on_gpu = self._device.type == "cuda"
        return r.WorkerInfo(
            device=str(self._device),
            device_name=devices.name_of(self._device),
            threads=torch.get_num_threads(),
            rss_bytes=psutil.Process(os.getpid()).memory_info().rss,
            device_bytes=torch.cuda.memory_reserved(self._device) if on_gpu else 0,
            device_free_bytes=devices.free_bytes(self._device),
            blocks=tuple(sorted(self._blocks)),
            tasks=len(self._tasks),
        )


def _with_gradient(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs.items() if spec.grad}


def _line(error: Exception) -> str:
    """The first line of what a kernel says, without its stack."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
