"""The promised models in real compute workers, a process for each stage: only bytes in shared memory come
and go.
"""

from collections.abc import AsyncIterator, Mapping, Sequence

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor

from hetpeer.stages.block.block_state import BlockState, layout_of, split
from hetpeer.stages.block.state_file import dump
from hetpeer.stages.graph.block_spec import BlockSpec, TensorSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.interpreter import SYMBOLS
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.compute import Compute, ComputeConfig
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from tests.stages.split_run import Outcome, assert_same_step, draw, eager_step, samples
from tests.stages.zoo import zoo

pytestmark = pytest.mark.xdist_group("zoo")

MODELS = (
    "mlp",
    "resnet",
    "gpt tied, dropout",
    "transformers gpt2",
    "transformers llama",
    "skip",
    "frozen",
    "no_grad",
)
COUNTS = (1, 2, 3, 5)
UPDATE = {"name": "AdamW", "learning_rate": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TOLERANCE = 1e-5


class Stage:
    """A compute worker and the blocks that it has been given."""

    def __init__(self, compute: Compute, specs: Sequence[BlockSpec]) -> None:
        self.specs = specs
        self._compute = compute
        self._arena = compute.arena
        self._used: list[Extent] = []

    def put(self, data: bytes) -> Extent:
        extent = self._room(len(data))
        self._arena.view(extent)[:] = data
        return extent

    def _room(self, nbytes: int) -> Extent:
        extent = self._arena.allocate(nbytes)
        self._used.append(extent)
        return extent

    async def load(self, tensors: Mapping[str, Tensor]) -> None:
        for spec in self.specs:
            buffers = {name: self.put(_bytes(tensors[name])) for name in spec.buffer_specs}
            graph = pack_block(spec)
            await self._compute.submit(
                c.PrepareBlock(
                    block=spec.index,
                    graph=graph,
                    buffers=buffers,
                    update=UPDATE,
                    keeps=("exp_avg", "exp_avg_sq"),
                )
            )
            vector = np.zeros(spec.vector_count, np.float32)
            for name, part in split(vector, layout_of(spec)):
                part[...] = tensors[name].numpy()
            state = dump(BlockState(version=0, parameters=vector), spec.index, layout_of(spec))
            place = self._compute.exchange.take(len(state))
            self._compute.exchange.part(place).write(0, state)
            await self._compute.submit(c.LoadState(block=spec.index, state=place))
            self._compute.exchange.give(place)

    async def forward(
        self, number: int, of: int, inputs: Mapping[str, Tensor], data: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], float | None]:
        batch, first, last = samples(data), self.specs[0], self.specs[-1]
        used = {name for spec in self.specs for name in spec.data}
        leaving = {n: s.at(batch) for n, s in last.outputs.items() if n != last.loss}
        outputs = {name: self._room(spec.nbytes) for name, spec in leaving.items()}
        done = await self._compute.submit(
            c.Forward(
                step=0,
                versions=(0,) * (last.index + 1 - first.index),
                task=str(number),
                begin=first.index,
                end=last.index + 1,
                inputs={name: self.put(_bytes(tensor)) for name, tensor in inputs.items()},
                data={name: self.put(_bytes(data[name])) for name in used},
                outputs=outputs,
                batch=batch,
                draw=draw(number, of),
            )
        )
        return {name: self._tensor(extent, leaving[name]) for name, extent in outputs.items()}, done.loss

    async def backward(
        self, number: int, batch: int, gradients: Mapping[str, Tensor], weight: float
    ) -> dict[str, Tensor]:
        entering = {n: s.at(batch) for n, s in self.specs[0].inputs.items() if s.grad}
        back = {name: self._room(spec.nbytes) for name, spec in entering.items()}
        wanted = {n for n, s in self.specs[-1].outputs.items() if s.grad and n != self.specs[-1].loss}
        await self._compute.submit(
            c.Backward(
                step=0,
                task=str(number),
                output_gradients={n: self.put(_bytes(gradients[n])) for n in wanted},
                input_gradients=back,
                weight=weight,
                slot=0,
                fold=tuple(spec.index for spec in self.specs),
            )
        )
        return {name: self._tensor(extent, entering[name]) for name, extent in back.items()}

    async def gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for spec in self.specs:
            extent = self._room(4 * spec.vector_count)
            await self._compute.submit(
                v.ExportSlot(step=0, block=spec.index, slot=0, begin=0, end=spec.vector_count, extent=extent)
            )
            vector = np.frombuffer(bytes(self._arena.view(extent)), np.float32)
            for name, part in split(vector, layout_of(spec)):
                if name in spec.parameter_specs:
                    found[name] = found.get(name, 0) + torch.from_numpy(part.copy())
        return found

    async def unload(self) -> None:
        for spec in self.specs:
            await self._compute.submit(c.Unload(block=spec.index))
        for extent in self._used:
            self._arena.release(extent)

    def _tensor(self, extent: Extent, spec: TensorSpec) -> Tensor:
        data = bytearray(self._arena.view(extent))
        return torch.frombuffer(data, dtype=SYMBOLS["dtype"][spec.dtype]).view(spec.sizes)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[list[Compute]]:
    """The workers of all tests, started as they are needed; each runs on a thread of its own."""
    started: list[Compute] = []
    yield started
    for worker in started:
        await worker.close()


@pytest.mark.proof
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("name", "count"),
    [(name, count) for name in MODELS for count in COUNTS],
)
async def test_stages_in_processes_equal_the_eager_module(
    workers: list[Compute], name: str, count: int
) -> None:
    model, dag, microbatches = zoo(name)
    eager = eager_step(model, microbatches)
    config = ComputeConfig(device="cpu", threads=1)
    while len(workers) < count:
        workers.append(await Compute.start(config, "hetpeer.averaging.worker_main"))
    blocks = cut_blocks(dag)
    blocks = blocks if len(blocks) >= count else cut_blocks(dag, count)
    ranges = balanced_ranges(blocks, count)
    stages = [Stage(w, blocks[b:e]) for w, (b, e) in zip(workers, ranges, strict=False)]
    for stage in stages:
        await stage.load(dag.tensors)
    assert_same_step(await _step(stages, microbatches), eager, TOLERANCE)
    for stage in stages:
        await stage.unload()


async def _step(stages: Sequence[Stage], microbatches: Sequence[Mapping[str, Tensor]]) -> Outcome:
    total, loss = sum(map(samples, microbatches)), 0.0
    for number, data in enumerate(microbatches):
        bundle: dict[str, Tensor] = {}
        for stage in stages:
            bundle, found = await stage.forward(number, len(microbatches), bundle, data)
        assert found is not None
        weight = samples(data) / total
        loss += weight * found
        gradients: dict[str, Tensor] = {}
        for stage in reversed(stages):
            gradients = await stage.backward(number, samples(data), gradients, weight)
    summed: dict[str, Tensor] = {}
    for stage in stages:
        for name, gradient in (await stage.gradients()).items():
            summed[name] = summed.get(name, 0) + gradient
    return Outcome(torch.tensor(loss), summed)
