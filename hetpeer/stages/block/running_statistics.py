"""BatchNorm's running values as a sum over microbatches, so that exactly-once holds for them too.

Microbatch by microbatch, torch does r ← (1 - m) r + m x. Over a step's M microbatches in the order of their
ids that is r ← (1 - m)^M r + Σ m (1 - m)^(M-1-i) xᵢ: the summands travel behind the gradient (docs/graph.md).
"""

from __future__ import annotations

import torch

from hetpeer.stages.block.exact_scalars import float32, power
from hetpeer.stages.graph.batchnorm import BATCH_NORM, momentum, running_values
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.own_operators import Pass


class RunningStatistics:
    """The running values of a block's BatchNorms, and their momenta."""

    def __init__(self, spec: BlockSpec) -> None:
        self._norms: dict[str, tuple[float, list[str]]] = {}
        rates: dict[str, float] = {}
        for node in spec.nodes:
            if node.op == BATCH_NORM:
                names = [spec.statistics[value.name] for value in running_values(node)]
                self._norms[node.name] = (momentum(node), names)
                rates |= dict.fromkeys(names, momentum(node))
        self._parts = [(rates[name], tensor.count) for name, tensor in spec.statistic_specs.items()]

    def weighted(self, here: Pass) -> dict[str, torch.Tensor]:
        """Running value → one microbatch's summand; `here` has the microbatch's place in the step."""
        result: dict[str, torch.Tensor] = {}
        for call, (rate, names) in self._norms.items():
            assert here.draw is not None
            later = here.draw.microbatches - 1 - here.draw.microbatch
            weight = float32(rate * power(1.0 - rate, later))
            for name, statistic in zip(names, here.statistics[call], strict=True):
                result[name] = statistic * weight
        return result

    def update(self, running: torch.Tensor, added: torch.Tensor, microbatches: int) -> None:
        """Apply a committed step in place: `running` decays, and the sum `added` of its microbatches is
        added.
        """
        begin = 0
        for rate, count in self._parts:
            part = slice(begin, begin + count)
            running[part].mul_(float32(power(1.0 - rate, microbatches))).add_(added[part])
            begin += count
