"""Backward passes that start from given gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Seeded(torch.autograd.Function):
    """A zero whose derivative with respect to each output is that output's seed."""

    @staticmethod
    def forward(ctx: Any, seeds: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.seeds = seeds
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.seeds


def backpropagate(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of `leaves` if each output has its seed as gradient; None for leaves out of reach.

    The same as `torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)`, which imports sympy to
    compare shapes: half a second and 37 MiB in every worker.
    """
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        _Seeded.apply(seeds, *outputs),  # type: ignore[no-untyped-call]
        leaves,
        allow_unused=True,
    )
    return found
