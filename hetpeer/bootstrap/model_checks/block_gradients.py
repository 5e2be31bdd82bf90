"""Gradients of the blocks beside those of the author's module, one block at a time.

The module's backward hands each parameter's gradient over when it is known. As soon as those of the last
block are there, that block computes its own from what entered it; both are subtracted and dropped, and the
block before it is next. So gradients of a few blocks exist at a time, whatever the size of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from hetpeer.bootstrap.model_checks.two_norm import two_norm
from hetpeer.stages.block.block import Block, backpropagate
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.graph_cost import ANY_DRAW
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.operators.own_operators import Pass

CPU = torch.device("cpu")


class BlockGradients:
    """2-norms of a module's gradients, and of their differences from those of its blocks, by parameter.

    Methods raise ProtocolError if a block cannot compute the microbatch.

        blocks = BlockGradients(specs, dag.tensors, example)
        blocks.await_of(names)
        blocks.take("wte.weight", gradient)  # of each parameter, in any order
        blocks.finish()
    """

    def __init__(
        self, specs: Sequence[BlockSpec], tensors: Mapping[str, Tensor], data: Mapping[str, Tensor]
    ) -> None:
        self.loss = 0.0
        """Loss of the blocks."""
        self.norms: dict[str, float] = {}
        """2-norm of the module's gradient."""
        self.differences: dict[str, float] = {}
        """2-norm of the difference."""
        self._tensors, self._data = tensors, data
        self._left = [unpack_block(pack_block(spec)) for spec in specs]  # as a volunteer gets it
        """Blocks whose gradients are still to be computed."""
        self._entered: list[dict[str, Tensor]] = []
        """Tensors that enter each of them."""
        self._seeds: dict[str, Tensor] = {}
        """Gradients of what leaves the last of them."""
        uses = Counter(name for spec in specs for name in spec.parameter_specs)
        self._parts = {name: count + 1 for name, count in uses.items()}
        """Gradients still to come: the module's, and that of each block with the parameter."""
        self._shared = {name for name, count in uses.items() if count > 1}
        self._awaited: set[str] = set()
        self._apart: dict[str, Tensor] = {}
        """The module's gradient without those of the blocks, so far as they came."""

    def await_of(self, names: Collection[str]) -> None:
        """Compute a block only when those of its parameters that are in `names` have come.

        That is for the sake of memory. What comes of a parameter that is not awaited counts as well.
        """
        self._awaited = set(names) - self._shared
        bundle: dict[str, Tensor] = {}
        here = Pass(ANY_DRAW)
        with torch.no_grad():
            for spec in self._left:
                block, _ = self._block(spec)
                self._entered.append({name: bundle[name] for name in spec.inputs})
                bundle = block.forward(self._entered[-1], self._data, spec.batch, here)
        (loss,) = bundle.values()
        self.loss = loss.item()
        self._seeds = {name: torch.ones_like(tensor) for name, tensor in bundle.items()}

    def take(self, name: str, gradient: Tensor) -> None:
        """Take the module's gradient of a parameter, which is changed, and compute blocks that waited."""
        self._came(name, gradient)
        while self._left and self._awaited.isdisjoint(self._left[-1].parameter_specs):
            self._backward()

    def finish(self) -> None:
        """Compute the blocks that are left: parameters whose gradient did not come have none."""
        while self._left:
            self._backward()
        for name in self._parts:
            self.norms.setdefault(name, 0.0)
            apart = self._apart.pop(name, None)
            self.differences[name] = 0.0 if apart is None else two_norm([apart])
        self._parts.clear()

    def _came(self, name: str, gradient: Tensor) -> None:
        self._awaited.discard(name)
        self.norms[name] = two_norm([gradient])
        apart = self._apart.pop(name, None)
        self._part(name, gradient if apart is None else apart.add_(gradient))

    def _part(self, name: str, apart: Tensor | None) -> None:
        """Note that one more gradient of a parameter is in `apart`; after the last one its norm is kept."""
        left = self._parts.pop(name, 1) - 1
        if left:
            self._parts[name] = left
            if apart is not None:
                self._apart[name] = apart
        else:
            self.differences[name] = 0.0 if apart is None else two_norm([apart])

    @torch.enable_grad()  # a hook of a backward has none
    def _backward(self) -> None:
        """Compute and subtract the gradients of the last block that is left."""
        spec, entered = self._left.pop(), self._entered.pop()
        block, parameters = self._block(spec)
        entering = {n: entered[n].detach().requires_grad_(one.grad) for n, one in spec.inputs.items()}
        leaving = block.forward(entering, self._data, spec.batch, Pass(ANY_DRAW))
        roots = [name for name, tensor in leaving.items() if tensor.requires_grad]
        if not roots:
            self._left.clear()  # nothing comes back to the blocks before it either
            return
        inputs = [name for name, tensor in entering.items() if tensor.requires_grad]
        found = backpropagate(
            [leaving[name] for name in roots],
            [*(entering[name] for name in inputs), *parameters.values()],
            [self._seeds[name] for name in roots],
        )
        # As the worker does: nothing came back for what only a region without gradients reads from here on.
        self._seeds = {
            name: torch.zeros_like(entering[name]) if gradient is None else gradient
            for name, gradient in zip(inputs, found, strict=False)
        }
        for name, gradient in zip(parameters, found[len(inputs) :], strict=True):
            apart = self._apart.pop(name, None)
            if gradient is not None:
                apart = -gradient if apart is None else apart.sub_(gradient)
            self._part(name, apart)

    def _block(self, spec: BlockSpec) -> tuple[Block, dict[str, Tensor]]:
        """The block on the author's tensors, and its parameters."""
        parameters = {name: self._tensors[name].detach().requires_grad_() for name in spec.parameter_specs}
        return Block(spec, parameters, self._tensors, self._tensors, CPU), parameters
