"""A block at work: bundle in, bundle out, on whatever parameters the caller hands over.

Nothing is kept here between calls. Gradients, microbatches and the optimizer are the caller's; autograd links what is
computed here to the tensors that came in. A holder of several blocks chains them with `run_range`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.graph.program import Program
from hetpeer.stages.graph.spec import BlockSpec, TensorSpec


class Block:
    """One block bound to its tensors and a device.

    `parameters` and `buffers` are read anew at each call and never written; their names are those of
    `spec.parameter_specs` and `spec.buffer_specs`. The spec is trusted: it was made by cut.py or came through
    `wire.unpack_block`. Raises ProtocolError when a tensor does not fit the spec.
    """

    def __init__(
        self,
        spec: BlockSpec,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.spec = spec
        _check(f"block {spec.index}: parameters", spec.parameter_specs, parameters)
        _check(f"block {spec.index}: buffers", spec.buffer_specs, buffers)
        self._owned = {name: parameters[fqn] for name, fqn in spec.parameters.items()}
        self._owned |= {name: buffers[fqn] for name, fqn in spec.buffers.items()}
        self._program = Program(spec.nodes, spec.outputs, device)

    def __repr__(self) -> str:
        return f"<Block {self.spec.index} {self.spec.parameter_count} parameters, {len(self.spec.nodes)} operators>"

    def forward(self, bundle: Mapping[str, Tensor], data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute one microbatch under the caller's grad mode.

        `bundle` holds exactly `spec.inputs`; `data` may hold more of the author's inputs than this block uses. An
        output whose spec says no gradient comes back is detached. Raises ProtocolError on a wrong name, shape or
        dtype, and when an operator refuses what it got (a token beyond the vocabulary).
        """
        spec = self.spec
        _check(f"block {spec.index}: bundle", spec.inputs, bundle)
        if unknown := bundle.keys() - spec.inputs.keys():
            raise ProtocolError(f"block {spec.index}: bundle has the unknown value {min(unknown)!r}")
        _check(f"block {spec.index}: data", spec.data, data)
        values = {**self._owned, **bundle, **{name: data[name] for name in spec.data}}
        results = self._program.run(values)
        return {
            name: results[name] if output.grad or not results[name].requires_grad else results[name].detach()
            for name, output in spec.outputs.items()
        }


def run_range(
    blocks: Sequence[Block], bundle: Mapping[str, Tensor], data: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Compute consecutive blocks of one holder; autograd runs through them. Errors as in `Block.forward`."""
    out = dict(bundle)
    for block in blocks:
        out = block.forward(out, data)
    return out


def flat_views(spec: BlockSpec, flat: Tensor) -> dict[str, Tensor]:
    """Parameter name -> view into the block's flat float32 vector [parameter_count], in the order of the spec.

    The views share memory with `flat` but not its autograd history: each may become a leaf of its own. `flat` may as
    well hold gradients or optimizer moments. Raises ProtocolError when `flat` is not such a vector.
    """
    if flat.shape != (spec.parameter_count,) or flat.dtype != torch.float32:
        what = f"{flat.dtype} {tuple(flat.shape)}"
        raise ProtocolError(f"block {spec.index} has {spec.parameter_count} float32 parameters, not {what}")
    parts = torch.split(flat, [part.count for part in spec.parameter_specs.values()])
    return {
        fqn: part.view(part_spec.shape).detach()
        for (fqn, part_spec), part in zip(spec.parameter_specs.items(), parts, strict=True)
    }


def _check(where: str, specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    for name, spec in specs.items():
        if name not in tensors:
            raise ProtocolError(f"{where}: {name!r} is missing")
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != spec.shape or dtype != spec.dtype:
            got, wanted = f"{dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)}"
            raise ProtocolError(f"{where}: {name!r} is {got} and should be {wanted}")
