"""Mean cross entropy behind a linear layer, some rows at a time: the logits never exist at once.

A vocabulary of 152,000 and 1,024 tokens make 622 MB of logits, and autograd keeps them twice. Here the logits
of some rows are made, used and dropped, and made again in the backward pass, as in Liger Kernel (Hsu et al.,
arXiv:2410.10989) and Cut Cross-Entropy (Wijmans et al., arXiv:2411.09009), whose kernels are for GPUs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody writes it)
from torch import Tensor

from hetpeer.stages.operators.operator_family import Operator

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
    if type(rows) is not int or not rows >= 1 or len(x) > rows * MAX_PARTS:
        raise ValueError(f"{len(x)} tokens in at most {MAX_PARTS} parts, not in parts of {rows}")
    result: Tensor = _LinearLoss.apply(x, weight, target, ignored, rows)  # type: ignore[no-untyped-call]
    return result


class _LinearLoss(torch.autograd.Function):
    """The loss, and its gradient from logits that are made again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, ignored: int, rows: int) -> Tensor:
        ctx.ignored, ctx.rows = ignored, rows
        ctx.autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
        ctx.save_for_backward(x, weight, target)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for part in parts_of(len(x), rows):
            logits = logits_of(x[part], weight)
            total += F.cross_entropy(logits, target[part], ignore_index=ignored, reduction="sum")
        return total / (target != ignored).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, target = ctx.saved_tensors
        counts = target != ctx.ignored
        scale = gradient / counts.sum()
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        of_x = torch.zeros_like(x) if wants_x else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        for part in parts_of(len(x), ctx.rows):
            with torch.autocast(x.device.type, torch.bfloat16) if ctx.autocast else nullcontext():
                logits = logits_of(x[part], weight)
            logits = torch.softmax(logits, dim=1)
            one = target[part].where(counts[part], 0).unsqueeze(1)
            logits.scatter_add_(1, one, torch.full_like(one, -1, dtype=logits.dtype))
            logits *= (counts[part] * scale).unsqueeze(1)
            # The products are those of the backward of a linear layer: in bfloat16 under autocast.
            flowing = logits.to(torch.bfloat16) if ctx.autocast else logits
            if of_x is not None:
                of_x[part] = (flowing @ weight.to(flowing.dtype)).to(x.dtype)
            if of_weight is not None and ctx.autocast:
                of_weight += (flowing.T @ x[part].to(flowing.dtype)).to(weight.dtype)
            elif of_weight is not None:
                of_weight.addmm_(flowing.T, x[part])
        return of_x, of_weight, None, None, None


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """Logits [rows, classes], float32."""
    return F.linear(x, weight).float()


def parts_of(tokens: int, rows: int) -> Iterator[slice]:
    """Slices of `tokens` rows, each of at most `rows`."""
    return (slice(begin, min(begin + rows, tokens)) for begin in range(0, tokens, rows))


FAMILY: Mapping[str, Operator] = {LINEAR_LOSS: Operator(linear_cross_entropy)}
