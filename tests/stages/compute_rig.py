"""What the compute tests share: a tiny GPT cut into blocks, and a holder of some of them that is driven by
commands.
"""

import functools
import itertools
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from hetpeer.averaging.optim.outer_optimizer import outer_of
from hetpeer.averaging.optim.update_rules import rule_of
from hetpeer.dht.base.file_pieces import read
from hetpeer.examples.gpt import build
from hetpeer.stages.block.block_state import BlockState
from hetpeer.stages.block.parameter_groups import MakeRules
from hetpeer.stages.block.state_file import dump
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.ipc.arena import Arena, Extent
from hetpeer.stages.ipc.block_commands import Backward, DumpState, Forward, LoadState, MergeSlot, PrepareBlock
from hetpeer.stages.ipc.nameless_file import DiskShare, NamelessFile
from hetpeer.stages.ipc.vector_commands import Apply, ExportSlot, InspectVector, SumVectors
from hetpeer.stages.ipc.worker_messages import CommandFailed, CommandFailedError
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from hetpeer.stages.worker.engine import Engine
from hetpeer.stages.worker.state_files import StateFiles
from hetpeer.stages.worker.tensor_staging import Copier, Staging

UPDATE = {"name": "AdamW", "learning_rate": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KEPT = ("exp_avg", "exp_avg_sq")
"""What that rule keeps of each parameter."""
BATCH, CONTEXT, VOCABULARY = 2, 8, 17
DRAW = Draw(0, 0, 0, 1)
CPU = torch.device("cpu")


def tiny_gpt(seed=0):
    torch.manual_seed(seed)
    return build(width=16, layers=3, heads=2, context=CONTEXT, vocabulary=VOCABULARY)


def microbatch(number):
    """Tokens and targets of one microbatch, int64 [B, T]."""
    generator = torch.Generator().manual_seed(1000 + number)
    tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


MODEL = tiny_gpt()


@functools.cache
def tiny_blocks() -> list[BlockSpec]:
    """The blocks of `tiny_gpt`; tracing takes seconds."""
    blocks = cut_blocks(trace(tiny_gpt(), microbatch(0)))
    assert len(blocks) >= 3
    return blocks


def state_file(model, spec: BlockSpec) -> bytes:
    parameters = dict(model.named_parameters())
    flat = np.concatenate([parameters[name].detach().numpy().ravel() for name in spec.parameter_specs])
    return dump(BlockState(version=0, parameters=flat), spec.index, layout(spec))


def layout(spec):
    return [(name, part.sizes) for name, part in spec.parameter_specs.items()]


def cpu_engine(arena: Arena, make_rule=rule_of, **where) -> Engine:
    """An engine without a process; `where`: the scratch file, and whether the device has its own memory."""
    torch.set_num_threads(1)
    files = StateFiles(exchange_of(arena).file)
    return Engine(CPU, Staging(arena.memory, Copier.of(CPU)), files, MakeRules(make_rule, outer_of), **where)


_EXCHANGES: WeakKeyDictionary[Arena, NamelessFile] = WeakKeyDictionary()


def exchange_of(arena: Arena) -> NamelessFile:
    """The exchange file of the engines that use `arena`."""
    if arena not in _EXCHANGES:
        _EXCHANGES[arena] = NamelessFile(Path(tempfile.gettempdir()), DiskShare(1 << 30))
    return _EXCHANGES[arena]


def submitter(engine: Engine):
    """`submit` of a holder whose engine is here."""

    async def submit(command):
        result = engine.execute(command)
        if isinstance(result, CommandFailed):
            raise CommandFailedError(result)
        return result

    return submit


class Holder:
    """Holds some blocks through `submit`, a coroutine function that carries out a command."""

    def __init__(self, submit, arena: Arena, blocks: list[BlockSpec], exchange: NamelessFile | None = None):
        self.submit = submit
        self.arena = arena
        self.exchange = exchange or exchange_of(arena)
        self.blocks = blocks
        self.begin, self.end = blocks[0].index, blocks[-1].index + 1
        self.dump_bytes: dict[int, int] = {}
        self.step = 0
        """The step that is computed, with the parameters of the version that has its number."""

    def put(self, data) -> Extent:
        view = memoryview(data.numpy() if isinstance(data, torch.Tensor) else data).cast("B")
        extent = self.arena.allocate(len(view))
        self.arena.view(extent)[:] = view
        return extent

    async def load_state(self, block: int, data: bytes):
        """Load a state file; its place in the exchange file is free afterwards."""
        place = self.exchange.take(len(data))
        try:
            self.exchange.part(place).write(0, data)
            return await self.submit(LoadState(block=block, state=place))
        finally:
            self.exchange.give(place)

    def floats(self, extent: Extent) -> np.ndarray:
        return np.frombuffer(self.arena.view(extent), dtype=np.float32)

    def room(self, specs) -> dict[str, Extent]:
        return {name: self.arena.allocate(spec.at(BATCH).nbytes) for name, spec in specs.items()}

    def release(self, *groups):
        for extent in itertools.chain.from_iterable(
            group.values() if isinstance(group, Mapping) else [group] for group in groups
        ):
            self.arena.release(extent)

    async def load(self, model, keeps=KEPT, **options):
        for spec in self.blocks:
            prepared = await self.submit(
                PrepareBlock(block=spec.index, graph=pack_block(spec), update=UPDATE, keeps=keeps, **options)
            )
            self.dump_bytes[spec.index] = prepared.dump_bytes
            await self.load_state(spec.index, state_file(model, spec))

    async def forward(self, task, number, inputs=None, *, train=True):
        """Returns (output extents, loss, extents that stay in use until the backward)."""
        last = self.blocks[-1]
        names = {name for spec in self.blocks for name in spec.data}
        data = {name: self.put(tensor) for name, tensor in microbatch(number).items() if name in names}
        outputs = self.room({n: s for n, s in last.outputs.items() if n != last.loss})
        done = await self.submit(
            Forward(
                step=self.step,
                versions=(self.step,) * (self.end - self.begin),
                task=task,
                begin=self.begin,
                end=self.end,
                batch=BATCH,
                draw=Draw(0, 0, number, 8),
                inputs=inputs or {},
                data=data,
                outputs=outputs,
                train=train,
            )
        )
        return outputs, done.loss, data

    async def backward(self, task, slot, gradients=None, *, weight=1.0, fold=None, weigh=False):
        """Returns the extents of the input gradients."""
        back = self.room({name: spec for name, spec in self.blocks[0].inputs.items() if spec.grad})
        await self.submit(
            Backward(
                step=self.step,
                task=task,
                output_gradients=gradients or {},
                input_gradients=back,
                weight=weight,
                slot=slot,
                fold=tuple(range(self.begin, self.end)) if fold is None else fold,
                weigh=weigh,
            )
        )
        return back

    async def merge(self, source, target):
        for spec in self.blocks:
            await self.submit(MergeSlot(step=self.step, block=spec.index, source=source, target=target))

    async def export(self, spec, slot) -> Extent:
        """A slot's vector, fetched as two shards and joined by Sum."""
        count = spec.parameter_count
        whole = self.arena.allocate(4 * count)
        middle = count // 3
        for begin, end in ((0, middle), (middle, count)):
            shard = self.arena.allocate(4 * (end - begin))
            of = {"step": self.step, "block": spec.index, "slot": slot}
            await self.submit(ExportSlot(**of, begin=begin, end=end, extent=shard))
            into = Extent(whole.offset + 4 * begin, 4 * (end - begin))
            await self.submit(SumVectors(parts=(shard,), into=into, elements=end - begin))
            self.release(shard)
        return whole

    async def state(self, block) -> bytes:
        place = self.exchange.take(self.dump_bytes[block])
        try:
            dumped = await self.submit(DumpState(block=block, extent=place))
            return bytes(read(self.exchange.part(place), 0, dumped.nbytes))
        finally:
            self.exchange.give(place)

    async def inspect(self, extent):
        return await self.submit(
            InspectVector(extent=extent, elements=extent.nbytes // 4, normed=((0, extent.nbytes // 4),))
        )

    async def apply(self, spec, gradient, coefficient, needed=None, base=None, compensation=0.0):
        """The update of the last block ends the step. Versions from `needed` on are kept."""
        done = await self.submit(
            Apply(
                block=spec.index,
                gradient=gradient,
                coefficient=coefficient,
                plan=1,
                batch=0,
                microbatches=8,
                needed=self.step + 1 if needed is None else needed,
                base=self.step if base is None else base,
                compensation=compensation,
            )
        )
        if spec is self.blocks[-1]:
            self.step = done.version
        return done


def norm(inspected) -> float:
    return math.sqrt(math.fsum(one.squared_norm for one in inspected))


def refused(code, text):
    return pytest.raises(CommandFailedError, match=f"{code}: .*{text}")


def plain_gradient(number, weight):
    """Parameter name → gradient of one microbatch, by autograd alone."""
    parameters = dict(MODEL.named_parameters())
    loss = MODEL(**microbatch(number))
    found = torch.autograd.grad(loss, list(parameters.values()), grad_outputs=torch.tensor(weight))
    return dict(zip(parameters, found, strict=True))


def flat(gradient, spec):
    return torch.cat([gradient[name].ravel() for name in spec.parameter_specs]).numpy()


async def backward(holder, number, slot, **options):
    _, _, data = await holder.forward(f"mb{number}", number)
    await holder.backward(f"mb{number}", slot, **options)
    holder.release(data)
