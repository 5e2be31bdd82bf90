"""Rehearsal of a block: its operators timed on this device before any state is there.

That gives λ, the efficiency of the device on such blocks (FusionLLM, arXiv 2410.12707, section 3.5). No time
is lost: kernels are chosen and caches filled for which the first microbatch would otherwise wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hetpeer.stages.block.block import Block, backpropagate
from hetpeer.stages.block.processor_quota import quota, stopwatch
from hetpeer.stages.graph.block_spec import BlockSpec, TensorSpec
from hetpeer.stages.graph.graph_cost import ANY_DRAW
from hetpeer.stages.graph.interpreter import SYMBOLS
from hetpeer.stages.operators.own_operators import Pass

RUNS = 3
"""Runs after the first one, in which torch imports, chooses and allocates."""
ENOUGH_S = 0.5
"""Seconds of a run after which a block is not run again."""


def rehearse(spec: BlockSpec, buffers: Mapping[str, Tensor], device: torch.device) -> float:
    """Seconds of forward and backward of one full microbatch on made-up tensors: the fastest of a few runs,
    as the processor quota lets them follow one another (processor_quota.py).

    A slower run shows what else the machine did, and a peer that seems slow is not asked again. It takes as
    much memory as a microbatch in training plus the block's parameters, and leaves none behind. Raises as
    `Block.forward` does, and torch's error if there is not enough memory.
    """
    parameters = {name: _made_up(one, device).requires_grad_() for name, one in spec.parameter_specs.items()}
    made_up = {name: _made_up(one, device) for name, one in spec.statistic_specs.items()}
    block = Block(spec, parameters, buffers, made_up, device, rows=True)
    full = spec.at(spec.batch)
    inputs = {name: _made_up(one, device).requires_grad_(one.grad) for name, one in full.inputs.items()}
    data = {name: _made_up(one, device) for name, one in full.data.items()}
    processors = math.inf if device.type == "cuda" else quota()
    leaves = [tensor for tensor in (*inputs.values(), *parameters.values()) if tensor.requires_grad]

    def run() -> float:
        taken_s = stopwatch(processors)
        outputs = block.forward(inputs, data, spec.batch, Pass(ANY_DRAW))
        roots = [outputs[name] for name, one in full.outputs.items() if one.grad]
        seeds = [torch.ones_like(root) for root in roots]
        if roots and leaves:
            backpropagate(roots, leaves, seeds)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return taken_s()

    run()
    taken = [run()]
    while len(taken) < RUNS and sum(taken) < ENOUGH_S:
        taken.append(run())
    return min(taken)


def _made_up(spec: TensorSpec, device: torch.device) -> Tensor:
    """A constant tensor: integer 0 is valid in every vocabulary and class; 0.01 is not denormal (slow)."""
    dtype = SYMBOLS["dtype"][spec.dtype]
    value = 0.01 if dtype.is_floating_point else 0
    return torch.full(spec.sizes, value, dtype=dtype, device=device)
