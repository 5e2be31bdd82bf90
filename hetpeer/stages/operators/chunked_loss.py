"""Mean cross entropy behind a linear layer, some rows at a time: the logits never exist at once.

A vocabulary of 152,000 and 1,024 tokens make 622 MB of logits, and autograd keeps them twice. Here the logits
of some rows are made, used and dropped. What the backward needs of them is known at once: the gradient of a
loss with respect to its logits is their softmax, minus one at the target. So a forward in training also makes
the gradients of the layer's input and weight, and the backward only scales them, as in Liger Kernel (Hsu et
al., arXiv:2410.10989), whose kernels are for GPUs alone. No logits are made twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody writes it)
from torch import Tensor

from hetpeer.stages.operators.operator_family import Operator, is_abstract

LINEAR_LOSS = "hetpeer.linear_cross_entropy"
MAX_PARTS = 4096


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, ignored: int, rows: int) -> Tensor:
    """Mean cross entropy of the logits x · weightᵀ at the targets that are not `ignored`; a float32 scalar.

    `x` [tokens, width], `weight` [classes, width], `target` [tokens] int64. At most `rows` tokens have logits
    at a time. Without a target that counts it is NaN, as torch's.
    """
    if x.dim() != 2 or weight.dim() != 2 or target.shape != x.shape[:1] or x.shape[1] != weight.shape[1]:
        raise ValueError("x is [tokens, width], the weight [classes, width], the target [tokens]")
    if target.dtype != torch.int64 or type(ignored) is not int:
        raise TypeError("targets are int64")
    if type(rows) is not int or not rows >= 1 or not 1 <= len(x) <= rows * MAX_PARTS:
        raise ValueError(f"{len(x)} tokens in 1 to {MAX_PARTS} parts, not in parts of {rows}")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        result: Tensor = _LinearLoss.apply(x, weight, target, ignored, rows)  # type: ignore[no-untyped-call]
        return result
    return _walk(x, weight, target, ignored, rows, _Gradients(None, None)) / (target != ignored).sum()


class _LinearLoss(torch.autograd.Function):
    """The loss, and its gradients, which the forward makes.

    One backward is all that a forward is good for: it changes the kept gradients in place. They take no more
    than the backward does anyway, since a pipeline has but one microbatch behind its last forward. In a dry
    run the backward makes them, so that costs are where planners look for them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, ignored: int, rows: int) -> Tensor:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        counted = (target != ignored).sum()
        ctx.abstract = is_abstract(x)
        if ctx.abstract:
            ctx.rows, ctx.dtype = rows, _product_dtype(x, weight)
            ctx.save_for_backward(x, weight, target != ignored, counted)
            return _walk(x, weight, target, ignored, rows, _Gradients(None, None)) / counted
        made = _Gradients.room(x if wants_x else None, weight if wants_weight else None)
        total = _walk(x, weight, target, ignored, rows, made)
        ctx.save_for_backward(*made, counted)
        return total / counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *kept, counted = ctx.saved_tensors
        if ctx.abstract:
            x, weight, counts = kept
            wants_x, wants_weight, *_ = ctx.needs_input_grad
            made = _Gradients.room(x if wants_x else None, weight if wants_weight else None)
            for part in parts_of(len(x), ctx.rows):
                flowing = x.new_empty(part.stop - part.start, len(weight), dtype=ctx.dtype)
                made.add(part, counts[part], flowing, x[part].to(ctx.dtype), weight.to(ctx.dtype))
            kept = list(made)
        scale = gradient / counted
        return *(None if one is None else one.mul_(scale) for one in kept), None, None, None


class _Gradients(NamedTuple):
    """Gradients of the sum of the losses; None: not asked for."""

    of_x: Tensor | None
    of_weight: Tensor | None

    @classmethod
    def room(cls, x: Tensor | None, weight: Tensor | None) -> _Gradients:
        """Tensors for the gradients of these two, of undefined content until the first part is added."""
        return cls(*(None if one is None else torch.empty_like(one) for one in (x, weight)))

    def add(self, part: slice, counting: Tensor, flowing: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add what the gradient `flowing` of the logits of the rows `part` gives, so far as rows count.

        The products are those of the backward of a linear layer, in the dtype of `x` and `weight`.
        """
        counting, first = counting.unsqueeze(1), part.start == 0
        if self.of_x is not None:
            self.of_x[part] = (flowing @ weight).where(counting, 0).to(self.of_x.dtype)
        if self.of_weight is None:
            return
        x = x.where(counting, 0)
        if x.dtype == self.of_weight.dtype:
            torch.addmm(self.of_weight, flowing.T, x, beta=0 if first else 1, out=self.of_weight)
        else:
            product = (flowing.T @ x).to(self.of_weight.dtype)
            (self.of_weight.copy_ if first else self.of_weight.add_)(product)


def _walk(
    x: Tensor, weight: Tensor, target: Tensor, ignored: int, rows: int, gradients: _Gradients
) -> Tensor:
    """Sum of the losses of the targets that count, float32; its gradients are added to `gradients`."""
    dtype = _product_dtype(x, weight)
    counts, table = target != ignored, weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    for part in parts_of(len(x), rows):
        counting, entering = counts[part], x[part].to(dtype)
        chances = torch.log_softmax(logits_of(entering, table), dim=1)
        one = target[part].where(counting, 0).unsqueeze(1)
        total -= chances.gather(1, one).squeeze(1).where(counting, 0).sum()
        if gradients != (None, None):
            flowing = chances.exp_()
            flowing.scatter_add_(1, one, torch.full_like(one, -1, dtype=flowing.dtype))
            gradients.add(part, counting, flowing.to(dtype), entering, table)
    return total


def _product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies: bfloat16 under autocast."""
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    return torch.bfloat16 if autocast else weight.dtype


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """Logits [rows, classes], float32."""
    return F.linear(x, weight).float()


def parts_of(tokens: int, rows: int) -> Iterator[slice]:
    """Slices of `tokens` rows, as few as there can be of at most `rows`, and none much shorter than others.

    Each part costs a pass over the weight, however short it is.
    """
    size = math.ceil(tokens / math.ceil(tokens / rows))
    return (slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size))


FAMILY: Mapping[str, Operator] = {LINEAR_LOSS: Operator(linear_cross_entropy)}
