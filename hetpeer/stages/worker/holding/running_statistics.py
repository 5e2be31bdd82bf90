"""The running values of a block's BatchNorms, as a sum over microbatches: exactly-once holds for them too.

Microbatch by microbatch, torch does r ← (1 - m) r + m x. Over a step's M microbatches in the order of their
ids that is r ← (1 - m)^M r + Σ m (1 - m)^(M-1-i) xᵢ: the summands travel behind the gradient (docs/graph.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetpeer.stages.block.exact_scalars import float32, power
from hetpeer.stages.graph.block_spec import BlockSpec, momentum, running_values
from hetpeer.stages.operators.names import BATCH_NORM
from hetpeer.stages.operators.own_operators import Pass


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
            weight = float32(_weight(rate, here.draw.microbatches, here.draw.microbatch))
            for name, statistic in zip(names, here.statistics[call], strict=True):
                result[name] = statistic * weight
        return result

    def update(
        self, running: torch.Tensor, added: torch.Tensor, microbatches: int, skipped: Sequence[int] = ()
    ) -> None:
        """Apply a committed step in place: `running` decays, and the microbatches' sum `added` is added.

        A `skipped` microbatch counts as if it had shown the running values themselves.
        """
        begin = 0
        for rate, count in self._parts:
            part = slice(begin, begin + count)
            kept = power(1.0 - rate, microbatches)
            for microbatch in skipped:
                kept += _weight(rate, microbatches, microbatch)
            running[part].mul_(float32(kept)).add_(added[part])
            begin += count


def _weight(rate: float, microbatches: int, microbatch: int) -> float:
    """Weight of a microbatch's statistics in the running values after its step."""
    return rate * power(1.0 - rate, microbatches - 1 - microbatch)
