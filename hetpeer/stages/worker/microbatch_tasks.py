"""Microbatches in the worker: forward, the kept graph, and backward into a slot.

A checker also measures how far rounding may carry another machine's numbers from its own (block/rounding.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.block import backpropagate
from hetpeer.stages.block.rounding import UNIT, UNMEASURED, Rounding
from hetpeer.stages.graph.block_spec import BlockSpec, TensorSpec
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.worker.exact_operators import RoundedOnce
from hetpeer.stages.worker.holding.held_block import HeldBlock
from hetpeer.stages.worker.holding.weights import Weights
from hetpeer.stages.worker.tensor_staging import CommandError, Staging, refuse_not_finite

Gradients = Mapping[str, Tensor | None]
"""Parameter name → its gradient; None if none comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPass:
    """One block's forward, with the graph that its backward needs."""

    held: HeldBlock
    parameters: Mapping[str, Tensor]
    """Leaves of the weights in the forward, to which the gradients belong."""
    spec: BlockSpec
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A microbatch between its forward and its backward."""

    passes: Sequence[BlockPass]
    weights: Sequence[Weights]
    data: Mapping[str, Tensor]
    batch: int
    here: Pass
    sparse: bool

    def runs(self, block: int) -> bool:
        """Whether block `block` is part of it."""
        return any(one.spec.index == block for one in self.passes)

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Tensors that entered the first block."""
        return self.passes[0].inputs

    @property
    def first(self) -> BlockSpec:
        """Spec of the first block."""
        return self.passes[0].spec


class MicrobatchTasks:
    """Microbatches between forward and backward. `held` returns a loaded block, or raises CommandError."""

    def __init__(self, staging: Staging, held: Callable[[int], HeldBlock]) -> None:
        self._staging = staging
        self._held = held
        self._tasks: dict[tuple[int, str], _Task] = {}
        """(step, name) → kept graph and tensors."""

    def __len__(self) -> int:
        return len(self._tasks)

    def forget(self, block: int) -> None:
        """Drop the graphs that block `block` is part of."""
        over = [task for task, kept in self._tasks.items() if kept.runs(block)]
        for task in over:
            del self._tasks[task]

    def clear(self, step: int) -> None:
        """Drop the graphs of `step`."""
        self._tasks = {key: task for key, task in self._tasks.items() if key[0] != step}

    def forward(self, command: c.Forward) -> r.Forwarded:
        """Run the blocks; with `train` keep their graph."""
        started = time.perf_counter()
        where = f"task {command.task}"
        held = [self._held(block) for block in range(command.begin, command.end)]
        if not held or len(command.versions) != len(held):
            raise CommandError(f"{where} runs no block, or names not one version for each")
        weights = [one.weights(version) for one, version in zip(held, command.versions, strict=True)]
        first, last = (weights[at].block.sized(command.batch) for at in (0, -1))
        here = Pass(command.draw if command.train else None)
        inputs = self._staging.read_finite(f"{where}, input", first.inputs, command.inputs)
        data_specs = {
            name: spec for one in weights for name, spec in one.block.sized(command.batch).data.items()
        }
        data = self._staging.read(f"{where}, data", data_specs, command.data)
        passes = run_blocks(held, weights, inputs, data, command.batch, here, train=command.train)
        outputs = passes[-1].outputs
        loss = None if last.loss is None else outputs[last.loss]
        specs = {name: spec for name, spec in last.outputs.items() if name != last.loss}
        seen = {f"{where}, output": {name: outputs[name] for name in specs}}
        refuse_not_finite(seen if loss is None else {**seen, where: {"loss": loss}})
        self._staging.write(f"{where}, output", specs, command.outputs, outputs)
        if command.train:
            self._tasks[command.step, command.task] = _Task(
                passes=passes,
                weights=weights,
                data=data,
                batch=command.batch,
                here=here,
                sparse=command.sparse,
            )
        value = None if loss is None else loss.item()
        return r.Forwarded(loss=value, seconds=time.perf_counter() - started, hits=here.hits)

    def backward(self, command: c.Backward) -> r.Backpropagated:
        """Run the backward of the kept graph into the slot."""
        started = time.perf_counter()
        where = f"task {command.task}"
        task = self._tasks.pop((command.step, command.task), None)
        if task is None:
            raise CommandError(f"no graph is kept of {where}")
        folded = [one.held for one in task.passes if one.held.spec.index in command.fold]
        if len(folded) != len(command.fold):
            raise CommandError(f"{where} did not run all of the blocks {list(command.fold)}")
        gradients: dict[int, Gradients] = {}
        seeds = back = self._seeds(where, task, command)
        for one in reversed(task.passes):
            block = one.held.spec.index
            back, gradients[block] = backpropagate_block(one, back, parameters=block in command.fold)
        if task.sparse:
            back = {name: part.where(task.inputs[name] != 0, 0.0) for name, part in back.items()}
        seen = {
            f"{where}, gradient of block {block}": {n: part for n, part in parts.items() if part is not None}
            for block, parts in gradients.items()
        }
        refuse_not_finite({**seen, f"{where}, gradient of input": back})
        rooms = [
            held.room(command.step, command.slot) for held in folded
        ]  # the last step that may fail for lack of memory
        specs = _with_gradient(task.first.inputs)
        self._staging.write(f"{where}, gradient of input", specs, command.input_gradients, back)
        for held, room in zip(folded, rooms, strict=True):
            held.fold(command.step, command.slot, room, gradients[held.spec.index], task.here)
        seconds = time.perf_counter() - started
        rounding = measure_rounding(task, seeds, back, gradients) if command.weigh else UNMEASURED
        return r.Backpropagated(seconds=seconds, rounding=rounding)

    def _seeds(self, where: str, task: _Task, command: c.Backward) -> Mapping[str, Tensor]:
        """Gradients of the last block's outputs, by name."""
        last = task.passes[-1]
        if last.spec.loss is not None:
            return {last.spec.loss: torch.full_like(last.outputs[last.spec.loss], command.weight)}
        specs = _with_gradient(last.spec.outputs)
        return self._staging.read_finite(f"{where}, gradient of output", specs, command.output_gradients)

    def drop(self, command: c.DropTask) -> r.Done:
        """Forget one graph."""
        self._tasks.pop((command.step, command.task), None)
        return r.Done()


def measure_rounding(
    task: _Task, seeds: Mapping[str, Tensor], back: Mapping[str, Tensor], gradients: Mapping[int, Gradients]
) -> Rounding:
    """Differences of the task's results from those of operators that round once; UNMEASURED if these fail.

    `back`, `gradients`: results of its backward from `seeds`, for the inputs and for each block.
    """
    held = [one.held for one in task.passes]
    again: Mapping[str, Tensor] = seeds
    squares: list[_Squares] = []
    try:
        with RoundedOnce():  # type: ignore[no-untyped-call]
            exact = run_blocks(
                held, task.weights, task.inputs, task.data, task.batch, Pass(task.here.draw), train=True
            )
            for one in reversed(exact):
                again, parts = backpropagate_block(one, again, parameters=True)
                own = gradients[one.spec.index]
                squares.append(_squares((part, parts[name]) for name, part in own.items()))
    except (ProtocolError, torch.OutOfMemoryError):
        return UNMEASURED
    last = task.passes[-1]
    left = [name for name in _with_gradient(last.spec.outputs) if name != last.spec.loss]
    squares.append(_squares((last.outputs[name], exact[-1].outputs[name]) for name in left))
    squares.append(_squares((part, again[name]) for name, part in back.items()))
    *sums, output, gradient = found = _Difference.of(squares)
    if not all(math.isfinite(one.apart) for one in found):
        return UNMEASURED
    return Rounding(
        output=output.apart,
        gradient=gradient.apart,
        sums=tuple(one.apart + UNIT * one.length for one in reversed(sums)),
        relative=max(one.relative for one in found),
    )


_Squares = list[tuple[Tensor, Tensor]]
"""Squared norms (float64 scalars on the device) of the differences of pairs of tensors, and of the first of
each pair.
"""


def _squares(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> _Squares:
    """Compare tensors pair by pair; None is a tensor of zeros, in both."""
    found = []
    for one, other in pairs:
        if one is not None and other is not None:
            if one.is_sparse:
                one, other = one.coalesce().values(), other.coalesce().values()  # noqa: PLW2901 - the same rows
            exact = one.detach().double()
            found.append(((exact - other.detach()).square_().sum(), exact.square_().sum()))
    return found


class _Difference(NamedTuple):
    """2-norms of a difference of two lists of tensors, and of the first list."""

    apart: float
    length: float

    @classmethod
    def of(cls, lists: Sequence[_Squares]) -> list[_Difference]:
        """The differences of so many pairs of lists; the device is waited for once."""
        scalars = [scalar for squares in lists for pair in squares for scalar in pair]
        numbers = iter(torch.stack(scalars).tolist() if scalars else ())
        found = []
        for squares in lists:
            apart = length = 0.0
            for _ in squares:
                apart += next(numbers)
                length += next(numbers)
            found.append(cls(math.sqrt(apart), math.sqrt(length)))
        return found

    @property
    def relative(self) -> float:
        """Relative difference, at most 1."""
        return min(1.0, self.apart / self.length) if self.length else float(self.apart > 0)


def run_blocks(
    held: Sequence[HeldBlock],
    weights: Sequence[Weights],
    inputs: Mapping[str, Tensor],
    data: Mapping[str, Tensor],
    batch: int,
    here: Pass,
    *,
    train: bool,
) -> list[BlockPass]:
    """Run consecutive blocks on one microbatch, each with a graph of its own.

    Between two blocks a bundle is what it would be on another machine: contiguous, and without a graph. So a
    block's numbers do not depend on which blocks its holder has besides, to the last bit: a replay needs to
    know nothing of places.
    """
    passes: list[BlockPass] = []
    for block, version in zip(held, weights, strict=True):
        spec = version.block.sized(batch)
        entering = {name: inputs[name].detach().contiguous() for name in spec.inputs}
        for name, one in spec.inputs.items():
            entering[name].requires_grad_(train and one.grad)
        with torch.set_grad_enabled(train):
            outputs = version.block.forward(entering, data, batch, here)
        passes.append(
            BlockPass(held=block, parameters=version.parameters, spec=spec, inputs=entering, outputs=outputs)
        )
        inputs = outputs
    return passes


def backpropagate_block(
    one: BlockPass, seeds: Mapping[str, Tensor], *, parameters: bool
) -> tuple[dict[str, Tensor], Gradients]:
    """Gradients of the block's inputs, contiguous, zeros where none comes back; and of its `parameters`.

    `seeds`: gradients of its outputs, by name.
    """
    roots = _with_gradient(one.spec.outputs)
    names = _with_gradient(one.spec.inputs)
    leaves = [one.inputs[name] for name in names]
    leaves += one.parameters.values() if parameters else ()
    found = iter(
        backpropagate([one.outputs[name] for name in roots], leaves, [seeds[name] for name in roots])
        if leaves
        else ()
    )
    back = {}
    for name in names:
        part = next(found)
        back[name] = torch.zeros_like(one.inputs[name]) if part is None else part.contiguous()
    return back, {name: next(found) for name in one.parameters} if parameters else {}


def _with_gradient(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs.items() if spec.grad}
