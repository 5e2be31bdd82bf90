"""The linear recurrence of state-space models over time as one operator, in place of a call for each step.

A Python loop over time is thousands of calls in a graph. The steps are computed one after the other here as
well, by the same products and sums, so results and gradients have the bits of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetpeer.stages.operators.operator_family import Operator, is_abstract

LINEAR_SCAN = "hetpeer.linear_scan"
MAX_STEPS = 1 << 16
"""Steps of one scan: each costs two calls of a kernel, however small its tensors are."""


def linear_scan(factors: Tensor, terms: Tensor, dim: int) -> Tensor:
    """States h₀ = terms₀, hₜ = factorsₜ · hₜ₋₁ + termsₜ along `dim`, in the shape of both arguments.

    Raises ValueError for more than MAX_STEPS steps, or tensors that differ in their shape or dtype.
    """
    if type(dim) is not int or not -terms.dim() <= dim < terms.dim():
        raise ValueError(f"a scan runs along a dimension of its tensors, not {dim!r}")
    if factors.shape != terms.shape or factors.dtype != terms.dtype or not terms.is_floating_point():
        raise ValueError("a scan takes factors and terms of one shape and floating-point dtype")
    if not 1 <= terms.shape[dim] <= MAX_STEPS:
        raise ValueError(f"a scan has 1 to {MAX_STEPS} steps, not {terms.shape[dim]}")
    result: Tensor = _LinearScan.apply(factors, terms, dim)  # type: ignore[no-untyped-call]
    return result


class _LinearScan(torch.autograd.Function):
    """The scan, and the gradient by the same recurrence from the last step to the first."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, terms: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        states = torch.empty_like(terms)
        if not is_abstract(terms):
            _run(factors.unbind(dim), terms.unbind(dim), states.unbind(dim))
        ctx.save_for_backward(factors, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factors, states = ctx.saved_tensors
        of_terms = torch.empty_like(gradient)
        if not is_abstract(gradient):
            # The gradient of a state is its own, and the next state's times the next factor.
            steps = (tensor.unbind(ctx.dim)[::-1] for tensor in (factors, gradient, of_terms))
            later, own, result = steps
            _run((later[0], *later[:-1]), own, result)
        if not ctx.needs_input_grad[0]:
            return None, of_terms, None
        of_factors = torch.zeros_like(factors)
        past, after = states.shape[ctx.dim] - 1, of_factors.narrow(ctx.dim, 1, states.shape[ctx.dim] - 1)
        torch.mul(of_terms.narrow(ctx.dim, 1, past), states.narrow(ctx.dim, 0, past), out=after)
        return of_factors, of_terms, None


def _run(factors: tuple[Tensor, ...], terms: tuple[Tensor, ...], states: tuple[Tensor, ...]) -> None:
    """Fill `states`; the first factor is not used."""
    states[0].copy_(terms[0])
    for step in range(1, len(states)):
        torch.mul(factors[step], states[step - 1], out=states[step])
        states[step].add_(terms[step])


FAMILY: Mapping[str, Operator] = {LINEAR_SCAN: Operator(linear_scan, work=2)}
