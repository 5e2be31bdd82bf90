"""Bytes of a place on the device, in main memory and in the scratch file, and the time that offload costs.

One engine holds some layers of a GPT and trains them with each kind of offload in turn, step by step, so that
all kinds see the same machine. On a GPU the device's bytes are torch's count at its peak. On a CPU a second
set of vectors stands for the device: its bytes are those of the weights there, and of all that forward and
backward of a microbatch allocate. The numbers of all kinds must be equal bits.

    python -m benchmarks.offload --width 1024 --layers 4
    python -m benchmarks.offload --first-stage    # 1.3 billion parameters, first of four stages: the plan too
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from hetpeer.averaging.optim.outer_optimizer import outer_of
from hetpeer.averaging.optim.update_rules import rule_of
from hetpeer.dht.base.file_pieces import OpenFile
from hetpeer.examples.gpt import GPT
from hetpeer.stages.block.block_state import BlockState, layout_of
from hetpeer.stages.block.device import pick
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.block.parameter_groups import MakeRules
from hetpeer.stages.block.state_file import file_bytes, write_state
from hetpeer.stages.graph.block_spec import BlockSpec, TensorSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc.arena import Arena, Extent
from hetpeer.stages.ipc.nameless_file import DiskShare, NamelessFile
from hetpeer.stages.ipc.worker_messages import Command, CommandFailed
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from hetpeer.stages.worker.engine import Engine
from hetpeer.stages.worker.holding.held_block import HeldBlock
from hetpeer.stages.worker.holding.scratch_file import ScratchFile
from hetpeer.stages.worker.holding.stored_vector import InMemory
from hetpeer.stages.worker.memory_footprint import LiveBytes
from hetpeer.stages.worker.state_files import StateFiles
from hetpeer.stages.worker.tensor_staging import Copier, Staging

UPDATE = {"name": "AdamW", "learning_rate": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KEPT = ("exp_avg", "exp_avg_sq")
ROUNDS = 5
ON_DEVICE = {"float32": 8.0, "bf16": 4.0}
"""Goal: bytes a parameter of transformer layers on the device, with offload."""
IN_HOST = 24.0
SLOWER = {"cpu": 1.10, "cuda": 1.05}
"""Goal: time of a step with offload in main memory, compared with none."""


@dataclass(frozen=True)
class Stage:
    """Blocks as one holder has them, one microbatch's size, and the device."""

    blocks: Sequence[BlockSpec]
    samples: int
    device: torch.device

    @property
    def parameters(self) -> int:
        return sum(spec.vector_count for spec in self.blocks)


class Trainer:
    """An engine with the stage's blocks and one kind of offload, in an arena of its own."""

    def __init__(self, stage: Stage, offload: Offload, scratch: ScratchFile, seed: int) -> None:
        self._stage = stage
        self._arena = Arena(16 * stage.parameters + (1 << 30))
        staging = Staging(self._arena.memory, Copier.of(stage.device))
        own = None if offload is Offload.NONE else True
        self._exchange = NamelessFile(Path(tempfile.gettempdir()), DiskShare(1 << 40))
        files, make = StateFiles(self._exchange.file), MakeRules(rule_of, outer_of)
        self.engine = Engine(stage.device, staging, files, make, scratch, own_memory=own)
        self._step = 0
        self._blocks = range(stage.blocks[0].index, stage.blocks[-1].index + 1)
        self._under_way: dict[int, tuple[c.Extents, c.Extents, list[c.Extents]]] = {}
        generator = np.random.default_rng(seed)
        for spec in stage.blocks:
            self._load(spec, offload, generator)

    def _load(self, spec: BlockSpec, offload: Offload, generator: np.random.Generator) -> None:
        self._ask(
            c.PrepareBlock(
                block=spec.index,
                graph=pack_block(spec),
                update=UPDATE,
                keeps=KEPT,
                offload=offload,
                cast=spec.autocast,
            )
        )
        vector = 0.02 * generator.standard_normal(spec.vector_count, dtype=np.float32)
        layout, state = layout_of(spec), BlockState(version=0, parameters=vector)
        place = self._exchange.take(file_bytes(layout, 1))
        nbytes = write_state(self._exchange.part(place), state, spec.index, layout)
        self._ask(c.LoadState(block=spec.index, state=Extent(place.offset, nbytes)))
        self._exchange.give(place)

    def _ask(self, command: Command[Any]) -> Any:
        result = self.engine.execute(command)
        if isinstance(result, CommandFailed):
            raise SystemExit(f"{type(command).__name__}: {result}")
        return result

    def _put(self, array: np.ndarray[Any, Any]) -> Extent:
        extent = self._arena.allocate(array.nbytes)
        self._arena.view(extent)[:] = memoryview(np.ascontiguousarray(array)).cast("B")
        return extent

    def _made_up(self, spec: TensorSpec, generator: np.random.Generator) -> Extent:
        if spec.dtype == "int64":
            return self._put(generator.integers(0, 1000, spec.sizes))
        values = torch.from_numpy(generator.standard_normal(spec.sizes, dtype=np.float32))
        return self._put(values.to(getattr(torch, spec.dtype)).view(torch.uint8).numpy())

    def microbatch(self, number: int) -> None:
        """Forward and backward of one microbatch into slot 0."""
        self.forward(number)
        self.backward(number)

    def forward(self, number: int) -> None:
        """Forward of microbatch `number`; its graph is kept."""
        first, last = (self._stage.blocks[at].at(self._stage.samples) for at in (0, -1))
        generator = np.random.default_rng(number)
        data = {
            name: spec
            for one in self._stage.blocks
            for name, spec in one.at(self._stage.samples).data.items()
        }
        outputs = {name: spec for name, spec in last.outputs.items() if name != last.loss}
        entering = {name: self._made_up(spec, generator) for name, spec in first.inputs.items()}
        given = {name: self._made_up(spec, generator) for name, spec in data.items()}
        seeds = {name: self._made_up(spec, generator) for name, spec in outputs.items()}
        leaving = {name: self._arena.allocate(spec.nbytes) for name, spec in outputs.items()}
        back = {n: self._arena.allocate(s.nbytes) for n, s in first.inputs.items() if s.grad}
        self._ask(
            c.Forward(
                step=self._step,
                versions=(self._step,) * len(self._blocks),
                task=str(number),
                begin=self._blocks.start,
                end=self._blocks.stop,
                batch=self._stage.samples,
                draw=Draw(0, self._step, number, 8),
                inputs=entering,
                data=given,
                outputs=leaving,
            )
        )
        self._under_way[number] = seeds, back, [entering, given, leaving, seeds, back]

    def backward(self, number: int) -> None:
        """Backward of microbatch `number` into slot 0."""
        seeds, back, extents = self._under_way.pop(number)
        self._ask(
            c.Backward(
                step=self._step,
                task=str(number),
                output_gradients=seeds,
                input_gradients=back,
                slot=0,
                fold=tuple(self._blocks),
            )
        )
        for group in extents:
            for extent in group.values():
                self._arena.release(extent)

    def update(self) -> list[str]:
        """Apply the step's sums; returns the digests of the states."""
        digests = []
        for spec in self._stage.blocks:
            extent = self._arena.allocate(4 * spec.vector_count)
            block, count = spec.index, spec.vector_count
            self._ask(v.ExportSlot(step=self._step, block=block, slot=0, begin=0, end=count, extent=extent))
            applied = self._ask(
                v.Apply(
                    block=block,
                    gradient=extent,
                    coefficient=1.0,
                    plan=1,
                    batch=self._step,
                    microbatches=8,
                    needed=self._step + 1,
                    base=self._step,
                )
            )
            self._arena.release(extent)
            digests.append(applied.digest)
        self._arena.trim()
        self._step += 1
        return digests

    def held(self) -> list[HeldBlock]:
        return [self.engine._held(spec.index) for spec in self._stage.blocks]

    def close(self) -> None:
        for spec in self._stage.blocks:
            self._ask(c.Unload(block=spec.index))
        self._arena.close()


def lies(trainer: Trainer, scratch: ScratchFile, used_before: int) -> dict[str, int]:
    """Bytes of weights, of other vectors in memory, and in the scratch file."""
    weights = memory = 0
    for held in trainer.held():
        weights += held.weights(held.version).nbytes
        kept = [*held._optimizer.values(), *held._slots._vectors.values()]
        kept += [] if held._masters is None else [held._masters]
        memory += sum(4 * vector.count for vector in kept if isinstance(vector, InMemory))
    return {"weights": weights, "memory": memory, "file": scratch.used - used_before}


def peak_of(trainer: Trainer, device: torch.device) -> tuple[int, int]:
    """(most bytes that a microbatch allocates on the device, bytes of all gradients before they are folded).

    The slot is there already.
    """
    seen: list[int] = []
    first = trainer.held()[0]

    def fold(*arguments: Any) -> None:
        seen.append(now())
        HeldBlock.fold(first, *arguments)

    setattr(first, "fold", fold)  # noqa: B010 - for this one microbatch
    try:
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            now = lambda: torch.cuda.memory_allocated(device) - before  # noqa: E731
            trainer.microbatch(1)
            return torch.cuda.max_memory_allocated(device) - before, seen[0]
        owned = [leaf for held in trainer.held() for leaf in held.weights(held.version).parameters.values()]
        owned += [held.slot(0, 0).whole() for held in trainer.held()]
        with LiveBytes(owned) as live:
            now = lambda: live.now  # noqa: E731
            trainer.microbatch(1)
        return live.peak, seen[0]
    finally:
        delattr(first, "fold")


def measure(stage: Stage, kinds: Sequence[Offload], microbatches: int, seed: int) -> dict[str, Any]:
    """Bytes and seconds of each kind; steps of all kinds in turn."""
    figures: dict[str, Any] = {}
    trainers: dict[Offload, Trainer] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = ScratchFile(OpenFile.nameless(Path(folder)), 64 << 30)
        for kind in kinds:
            before = scratch.used
            trainer = trainers[kind] = Trainer(stage, kind, scratch, seed)
            trainer.microbatch(0)
            peak, gradients = peak_of(trainer, stage.device)
            found = lies(trainer, scratch, before)
            apart = kind is not Offload.NONE
            owned = found["weights"] + (0 if apart else found["memory"])
            trainer.update()
            figures[kind.value] = {
                "device_peak_bytes": owned + peak,
                "device_bytes_a_parameter": (owned + gradients) / stage.parameters,
                "host_bytes_a_parameter": found["memory"] / stage.parameters if apart else 0.0,
                "file_bytes_a_parameter": found["file"] / stage.parameters,
            }
        seconds: dict[Offload, list[float]] = {kind: [] for kind in kinds}
        whole: dict[Offload, list[float]] = {kind: [] for kind in kinds}
        states: dict[Offload, list[str]] = {}
        for _ in range(ROUNDS):
            for kind, trainer in trainers.items():
                began = time.perf_counter()
                for number in range(microbatches):
                    trainer.microbatch(number)
                computed = time.perf_counter()
                states[kind] = trainer.update()
                seconds[kind].append((computed - began) / microbatches)
                whole[kind].append(time.perf_counter() - began)
        for kind, trainer in trainers.items():
            ratios = [one / plain for one, plain in zip(whole[kind], whole[kinds[0]], strict=True)]
            figures[kind.value] |= {
                "microbatch_s": statistics.median(seconds[kind]),
                "step_s": statistics.median(whole[kind]),
                "step_compared_with_none": statistics.median(ratios),
            }
            trainer.close()
    return figures | {
        "parameters": stage.parameters,
        "equal_bits": len({tuple(s) for s in states.values()}) == 1,
    }


def layers_of(options: Any, device: torch.device, *, bf16: bool) -> Stage:
    """Transformer layers without embedding and head: a middle stage."""
    torch.manual_seed(options.seed)
    model = GPT(options.width, options.layers, options.width // 64, options.context, 1000)
    tokens = torch.zeros(options.samples, options.context, dtype=torch.int64)
    dag = trace(model, {"tokens": tokens, "targets": tokens}, autocast=bf16)
    blocks = cut_blocks(dag, mode=ComputeMode(autocast=bf16))
    return Stage(blocks[1:-1], options.samples, device)


def main() -> int:
    """Measure, keep and show the figures."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if report.without_gpu(options.device):
        return 0
    torch.set_num_threads(options.threads)
    device = pick(options.device)
    figures: dict[str, Any] = {"device": str(device)}
    for name in ON_DEVICE:
        stage = layers_of(options, device, bf16=name == "bf16")
        figures[name] = measure(stage, list(Offload), options.microbatches, options.seed)
    figures["goals"] = goals(figures, device.type)
    figures["met"] = all(figures["goals"].values())
    return report.finish("offload" if device.type == "cpu" else "offload-gpu", figures, options, show)


def goals(figures: dict[str, Any], kind: str) -> dict[str, bool]:
    """Goal → whether it is met."""
    found = {}
    for name, most in ON_DEVICE.items():
        own = figures[name]
        found[f"{name}: equal bits with every kind"] = own["equal_bits"]
        found[f"{name}: a step with offload takes at most {SLOWER[kind]} of one without"] = (
            own["host"]["step_compared_with_none"] <= SLOWER[kind]
        )
        found[f"{name}: at most {IN_HOST:.0f} bytes a parameter in main memory"] = (
            own["host"]["host_bytes_a_parameter"] <= IN_HOST
        )
        found[f"{name}: at most {most:.0f} bytes a parameter on the device, without activations"] = (
            round(own["host"]["device_bytes_a_parameter"], 1) <= most
        )
    return found


def show(figures: dict[str, Any]) -> None:
    """The figures in words."""
    for name in ON_DEVICE:
        own = figures[name]
        print(f"{name}, {own['parameters'] / 1e6:.1f} M parameters on {figures['device']}:")
        for kind in Offload:
            one = own[kind.value]
            print(
                f"  {kind.value:5} device {one['device_bytes_a_parameter']:5.2f}, main memory "
                f"{one['host_bytes_a_parameter']:5.2f}, file {one['file_bytes_a_parameter']:5.2f} bytes a "
                f"parameter; a step {one['step_s']:.2f} s, {one['step_compared_with_none']:.3f} of none's"
            )
    report.show_goals(figures["goals"])


if __name__ == "__main__":
    sys.exit(main())
