"""One microbatch computed by one process, block by block: can it be computed at all?

The blocks are those that volunteers run, with the states of a checkpoint. There is one block in memory at a
time: the forward pass keeps what passes between blocks, and the backward pass runs each block again from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.block import backpropagate
from hetpeer.stages.block.block_state import pieces_of
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.worker.holding.weights import WeightLayout, Weights
from hetpeer.stages.worker.tensor_staging import Copier, NotFiniteError, refuse_not_finite

CPU = torch.device("cpu")


class MicrobatchTrial:
    """Computes microbatches of `run` from the states of the checkpoint `record`."""

    def __init__(self, run: RunDirectory, record: Record) -> None:
        self._run, self._record = run, record
        self._store = CheckpointStore(run, run.layouts())
        self._specs = [run.block_spec(entry) for entry in run.manifest.blocks]
        self._plan = run.manifest.data_plan
        self._batches = run.batches()

    def find(self, batch: int, number: int) -> tuple[str, list[int]] | None:
        """Why microbatch `number` of `batch` cannot be computed, and its samples that are at fault, counted
        from 0 in the microbatch. None: it can be. If no sample fails alone in that way, all are named.
        """
        arrays = self._batches.microbatch(batch, number)
        data = {name: torch.from_numpy(array) for name, array in arrays.items()}
        everything = range(self._plan.size_of(number))
        why = self._fault(batch, number, data, everything)
        if why is None:
            return None
        alone = [i for i in everything if self._fault(batch, number, data, [i]) == why]
        return why, alone or list(everything)

    def _fault(
        self, batch: int, number: int, data: Mapping[str, Tensor], samples: Sequence[int]
    ) -> str | None:
        """Description of the failure that these samples of a microbatch cause; None if there is none."""
        chosen = {name: tensor[list(samples)] for name, tensor in data.items()}
        held_out = number >= self._plan.microbatches
        draw = None if held_out else Draw(self._plan.seed, batch, number, self._plan.microbatches)
        try:
            entering = self._forward(chosen, len(samples), draw)
            if not held_out:
                self._backward(entering, chosen, len(samples), draw)
        except NotFiniteError as error:
            return error.what
        except ProtocolError as error:
            return f"{error.what}: {error.why}"
        return None

    def _forward(self, data: Mapping[str, Tensor], size: int, draw: Draw | None) -> list[dict[str, Tensor]]:
        """Tensors that enter each block. Raises as volunteers do if something is not finite, or refused."""
        entering: list[dict[str, Tensor]] = [{}]
        for index, spec in enumerate(self._specs):
            with torch.no_grad():
                leaving = self._block(index).block.forward(entering[-1], data, size, Pass(draw))
            named = {"loss" if name == spec.loss else name: tensor for name, tensor in leaving.items()}
            refuse_not_finite({f"block {index}": named})
            entering.append(leaving)
        return entering[:-1]

    def _backward(
        self, entering: list[dict[str, Tensor]], data: Mapping[str, Tensor], size: int, draw: Draw | None
    ) -> None:
        """Run each block again, last one first, and its backward. Raises as `_forward`."""
        seeds: Mapping[str, Tensor] = {}
        for index in reversed(range(len(self._specs))):
            weights = self._block(index)
            spec = weights.block.sized(size)
            inputs = {n: entering[index][n].requires_grad_(one.grad) for n, one in spec.inputs.items()}
            leaving = weights.block.forward(inputs, data, size, Pass(draw))
            roots = {name: tensor for name, tensor in leaving.items() if tensor.requires_grad}
            behind = [name for name, tensor in inputs.items() if tensor.requires_grad]
            leaves = [*(inputs[name] for name in behind), *weights.parameters.values()]
            if not roots or not leaves:
                return
            weight = size / self._plan.batch_size
            given = [seeds.get(name, torch.full_like(tensor, weight)) for name, tensor in roots.items()]
            found = backpropagate(list(roots.values()), leaves, given)
            names = (*(f"gradient of input {name}" for name in behind), *weights.parameters)
            gradients = {n: g for n, g in zip(names, found, strict=True) if g is not None}
            refuse_not_finite({f"gradient of block {index}": gradients})
            seeds = {
                name: torch.zeros_like(inputs[name]) if gradient is None else gradient
                for name, gradient in zip(behind, found, strict=False)
            }

    def _block(self, index: int) -> Weights:
        """The block at work. Raises `LocalError` if its files are damaged."""
        state = self._store.state(self._record, index)
        reference = self._run.manifest.blocks[index].buffers
        buffers = {} if reference is None else load_file(self._run.path / "state" / reference.name)
        weights = Weights.first(WeightLayout(self._specs[index]), buffers, CPU)
        for begin, piece in pieces_of(state.numbers()[""]):
            weights.put(begin, torch.from_numpy(piece), Copier())
        return weights
