"""The worker's engine: blocks, kept graphs and slots, changed by one command at a time.

No socket and no process here: `Engine.execute(command) -> result` may be called from anywhere, as tests do. A
command that cannot be carried out is answered by `CommandFailed` and has changed nothing. Only a broken GPU
context is raised, since nothing can be computed after it: the process ends and the daemon starts another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from hetpeer.stages.block import device as devices
from hetpeer.stages.block.arithmetic import arithmetic_of
from hetpeer.stages.block.block_state import layout_of
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.block.parameter_groups import BlockRules, MakeRules, segments
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.links.codec import Codec
from hetpeer.stages.worker.executor import Executor
from hetpeer.stages.worker.freed_memory import give_back
from hetpeer.stages.worker.holding.held_block import HeldBlock, dump_bytes
from hetpeer.stages.worker.holding.residence import Residence
from hetpeer.stages.worker.holding.scratch_file import ScratchFile
from hetpeer.stages.worker.holding.stored_vector import InMemory, StoredVector
from hetpeer.stages.worker.microbatch_tasks import MicrobatchTasks
from hetpeer.stages.worker.rehearsal import rehearse
from hetpeer.stages.worker.state_files import StateFiles
from hetpeer.stages.worker.tensor_staging import CommandError, Staging, refuse_not_finite
from hetpeer.stages.worker.vector_sums import VectorSums, among, inspect, mark


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A block without its state."""

    spec: BlockSpec
    buffers: Mapping[str, torch.Tensor]
    rules: BlockRules
    offload: Offload
    scratch: ScratchFile | None
    cast: bool


class Engine(Executor):
    """Everything that the worker holds on one device.

    engine = Engine(torch.device("cpu"), Staging(memory, Copier()), StateFiles(exchange), make_rules)
    result = engine.execute(Info())  # WorkerInfo
    """

    def __init__(
        self,
        device: torch.device,
        staging: Staging,
        files: StateFiles,
        make: MakeRules,
        scratch: ScratchFile | None = None,
        *,
        own_memory: bool | None = None,
    ) -> None:
        """`scratch`: the file for vectors that have no place in memory; None: there is none.

        `files`: states that come and go.
        `own_memory`: whether the device has memory of its own; None: a GPU has.
        """
        self._scratch = scratch
        self._own_memory = device.type == "cuda" if own_memory is None else own_memory
        self._device = device
        self._staging = staging
        self._files = files
        self._make = make
        self._prepared: dict[int, _Prepared] = {}
        self._blocks: dict[int, HeldBlock] = {}
        self._tasks = MicrobatchTasks(self._staging, self._held)
        sums = VectorSums(self._staging, self._round)
        super().__init__(
            {
                c.PrepareBlock: self._prepare,
                c.LoadState: self._load,
                c.Unload: self._unload,
                c.Forward: self._tasks.forward,
                c.Backward: self._tasks.backward,
                c.DropTask: self._tasks.drop,
                c.MergeSlot: self._merge_slot,
                c.DropSlot: self._drop_slot,
                v.ExportSlot: self._export_slot,
                v.ExportState: self._export_state,
                v.ExportMovement: self._export_movement,
                v.CopyBlock: self._keep_copy,
                v.DropCopies: self._drop_copies,
                c.ClearStep: self._clear_step,
                v.SumVectors: sums.add,
                v.MarkSlot: self._mark_slot,
                v.MarkVector: sums.mark,
                v.InspectVector: sums.inspect,
                v.InspectSlot: self._inspect_slot,
                v.Apply: self._apply,
                v.Install: self._install,
                c.DumpState: self._dump_state,
                c.WarmUp: self._warm_up,
                c.Rehearse: self._rehearse,
                c.Info: self._info,
                c.LimitScratch: self._limit_scratch,
            }
        )

    # ── blocks ─────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self, command: c.PrepareBlock) -> r.BlockPrepared:
        """Load a graph and its buffers; the state comes with another command."""
        spec = unpack_block(command.graph)
        if spec.index != command.block:
            raise CommandError(f"the graph of block {command.block} says it is block {spec.index}")
        buffers = self._staging.read(f"block {spec.index}", spec.buffer_specs, command.buffers)
        own = {name: buffer.clone() for name, buffer in buffers.items()}  # the daemon releases the extents
        rules = BlockRules(
            segments=segments(spec, command.update, command.groups, self._make.update),
            keeps=command.keeps,
            outer=None if command.outer is None else self._make.outer(command.outer),
            ranges=command.ranges,
        )
        self._forget(spec.index)
        self._prepared[spec.index] = _Prepared(
            spec=spec,
            buffers=own,
            rules=rules,
            offload=command.offload,
            scratch=self._scratch if command.spills else None,
            cast=command.cast,
        )
        return r.BlockPrepared(dump_bytes=dump_bytes(spec, rules))

    def _limit_scratch(self, command: c.LimitScratch) -> r.Done:
        if self._scratch is not None:
            self._scratch.keep_within(command.nbytes)
        return r.Done()

    def _load(self, command: c.LoadState) -> r.Loaded:
        prepared = self._ready_for_state(command.block)
        spec = prepared.spec.recomputing() if command.recompute else prepared.spec
        residence = Residence(
            device=self._device,
            own_memory=self._own_memory,
            offload=prepared.offload,
            cast=prepared.cast,
            scratch=prepared.scratch,
            copier=self._staging.copier,
        )
        with self._files.in_use():
            state = self._files.open(command.state, spec.index, layout_of(spec), prepared.rules.keeps)
            digest = state.digest()  # all of it is read and found right before the old state is dropped
            self._forget(spec.index)
            self._blocks[spec.index] = held = HeldBlock(
                spec, prepared.buffers, state, prepared.rules, residence
            )
        give_back()
        return r.Loaded(version=held.version, digest=digest)

    def _ready_for_state(self, block: int) -> _Prepared:
        if block not in self._prepared:
            raise CommandError(f"block {block} is not prepared")
        return self._prepared[block]

    def _unload(self, command: c.Unload) -> r.Done:
        self._prepared.pop(command.block, None)
        self._forget(command.block)
        give_back()
        return r.Done()

    def _forget(self, block: int) -> None:
        """Drop a block's state and the graphs made of it."""
        if (held := self._blocks.pop(block, None)) is not None:
            held.free()
        self._tasks.forget(block)

    def _held(self, block: int) -> HeldBlock:
        if block not in self._blocks:
            raise CommandError(f"block {block} is not loaded")
        return self._blocks[block]

    def _apply(self, command: v.Apply) -> r.UpdateApplied:
        """Apply a reduced gradient to the state, and settle the rounding errors of its plan."""
        started = time.perf_counter()
        held = self._held(command.block)
        held.base_of(command)  # refused before anything changes
        if command.gradient is None:
            gradient = held.take_inspected(command.slot)
        else:
            gradient = self._to_update(held, "gradient", command.gradient)
        with self._whole(held):
            self._tasks.clear(held.version)
            held.update(gradient, command)
            held.losses.settle(*v.GRADIENTS, plan=command.plan)
        return self._applied(held, started)

    def _install(self, command: v.Install) -> r.UpdateApplied:
        started = time.perf_counter()
        held = self._held(command.block)
        total = self._to_update(held, "average", command.total)
        with self._whole(held):
            held.install(total.whole(), command)
            held.losses.settle(v.PARAMETERS[1], plan=command.plan)
        return self._applied(held, started)

    def _applied(self, held: HeldBlock, started: float) -> r.UpdateApplied:
        digest = held.digest()
        return r.UpdateApplied(version=held.version, digest=digest, seconds=time.perf_counter() - started)

    def _to_update(self, held: HeldBlock, name: str, extent: Extent) -> InMemory:
        """The vector in `extent` where updates run. Raises NotFiniteError."""
        vector = self._staging.floats(extent, held.spec.vector_count)
        refuse_not_finite({f"block {held.spec.index}": {name: vector}})
        return InMemory(vector if held.residence.apart else self._staging.up(vector))

    @contextmanager
    def _whole(self, held: HeldBlock) -> Iterator[None]:
        """Complete an update of `held` or forget the block: half updated it is of no version."""
        try:
            yield
        except BaseException:
            self._forget(held.spec.index)
            raise

    def _dump_state(self, command: c.DumpState) -> r.Dumped:
        """Write the state file into the extent of the exchange file. Raises `LocalError` HP-DISK-009."""
        held = self._held(command.block)
        with self._files.in_use():
            nbytes = self._files.dump(command.extent, held, command.block, layout_of(held.spec))
        return r.Dumped(nbytes=nbytes)

    # ── slots ──────────────────────────────────────────────────────────────────────────────────────────────

    def _merge_slot(self, command: c.MergeSlot) -> r.Done:
        self._held(command.block).merge_slot(command.step, command.source, command.target)
        return r.Done()

    def _drop_slot(self, command: c.DropSlot) -> r.Done:
        self._held(command.block).drop_slot(command.step, command.slot)
        return r.Done()

    def _export_slot(self, command: v.ExportSlot) -> r.VectorExported:
        held = self._held(command.block)
        held.make_way()
        return self._export(held.slot(command.step, command.slot), command)

    def _export_state(self, command: v.ExportState) -> r.VectorExported:
        held = self._held(command.block)
        held.make_way()
        return self._export(held.copy if command.copy else held.vector, command)

    def _export_movement(self, command: v.ExportMovement) -> r.VectorExported:
        held = self._held(command.block)
        held.make_way()
        _must_be_within(command.begin, command.end, held.spec.parameter_count)
        movement, part = held.movement(), (command.begin, command.end)
        if command.decoded:
            self._staging.floats(command.extent, command.end - command.begin).copy_(movement.read(*part))
        else:
            written = movement.written(*part)
            self._staging.raw(command.extent)[: len(written)] = written
        return r.VectorExported(rounded=not command.decoded)

    def _keep_copy(self, command: v.CopyBlock) -> r.Done:
        self._held(command.block).keep_copy()
        return r.Done()

    def _drop_copies(self, _: v.DropCopies) -> r.Done:
        for held in self._blocks.values():
            held.drop_copy()
            held.losses.drop(*v.PARAMETERS)
        return r.Done()

    def _export(self, vector: StoredVector, command: v.ExportSlot | v.ExportState) -> r.VectorExported:
        """Copy elements [begin, end) of a vector to the arena, rounded by a codec if one is named."""
        _must_be_within(command.begin, command.end, vector.count)
        part = vector.piece(command.begin, command.end)
        if command.rounding is not None and self._round(command.rounding, part, command.extent) is not None:
            return r.VectorExported(rounded=True)
        self._staging.down(part, self._staging.floats(command.extent, len(part)))
        return r.VectorExported(rounded=False)

    def _round(self, how: v.Rounding, piece: torch.Tensor, into: Extent) -> torch.Tensor | None:
        """Encode `piece` into an extent; None if the codec cannot (see `CodecLosses.round`)."""
        return self._held(how.block).losses.round(
            Codec.of(how.codec),
            piece,
            self._staging.raw(into),
            name=how.keeps,
            plan=how.plan,
            begin=how.begin,
            parts=how.parts,
        )

    def _inspect_slot(self, command: v.InspectSlot) -> r.Inspected:
        held = self._held(command.block)
        vector = held.slot(command.step, command.slot)
        seen = inspect(vector, command.normed, command.groups)
        if seen.finite:
            held.slot_inspected(command.step, command.slot)
        return seen

    def _mark_slot(self, command: v.MarkSlot) -> r.Marked:
        slot = self._held(command.marking.block).slot(command.step, command.slot)
        how = command.marking
        among(how, 0, slot.count)
        return r.Marked(marks=mark(slot.piece(how.begin, how.end), how.begin, how))

    def _clear_step(self, command: c.ClearStep) -> r.Done:
        self._tasks.clear(command.step)
        for held in self._blocks.values():
            held.clear_slots(command.step)
            held.losses.drop(*v.GRADIENTS)
        return r.Done()

    # ── the worker itself ──────────────────────────────────────────────────────────────────────────────────

    def _warm_up(self, _: c.WarmUp) -> r.WarmedUp:
        return r.WarmedUp(flops_per_second=devices.measure_flops(self._device))

    def _rehearse(self, command: c.Rehearse) -> r.Rehearsed:
        prepared = self._ready_for_state(command.block)
        return r.Rehearsed(seconds=rehearse(prepared.spec, prepared.buffers, self._device))

    def _info(self, _: c.Info) -> r.WorkerInfo:
        """Device, memory and contents of this worker."""
        on_gpu = self._device.type == "cuda"
        free, total = devices.memory_of(self._device)
        return r.WorkerInfo(
            device=str(self._device),
            device_name=devices.name_of(self._device),
            device_uuid=devices.uuid_of(self._device),
            arithmetic=arithmetic_of(self._device),
            threads=torch.get_num_threads(),
            rss_bytes=psutil.Process(os.getpid()).memory_info().rss,
            device_bytes=torch.cuda.memory_reserved(self._device) if on_gpu else 0,
            device_free_bytes=free,
            device_total_bytes=total,
            blocks=tuple(sorted(self._blocks)),
            tasks=len(self._tasks),
            gpus=devices.gpus(),
        )


def _must_be_within(begin: int, end: int, count: int) -> None:
    """Raise CommandError if a vector of `count` elements has no part [begin, end)."""
    if not begin <= end <= count:
        raise CommandError(f"a vector of {count} elements has no part [{begin}, {end})")
