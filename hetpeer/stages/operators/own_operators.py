"""Operators of our own, whose result depends on the task that runs them and on its mode.

They stand for operators of torch with hidden state: dropout with a global generator, BatchNorm with buffers
that change. Each gets the `Pass` that it runs in and the name of its call. docs/graph.md explains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody writes it)
from torch import Tensor

from hetpeer.stages.operators import philox, random_draws
from hetpeer.stages.operators.names import ATTENTION, BATCH_NORM, DROPOUT
from hetpeer.stages.operators.operator_family import Operator, is_abstract
from hetpeer.stages.operators.random_draws import Draw

MAX_OPERATORS = 1 << 32
aten: Any = torch.ops.aten


class Pass:
    """One forward pass: the source of its random numbers, and the statistics that it leaves.

    `draw` is None in an evaluation: then dropout is the identity, and BatchNorm uses its running values.
    """

    def __init__(self, draw: Draw | None) -> None:
        self.draw = draw
        self.statistics: dict[str, tuple[Tensor, Tensor]] = {}
        """Name of a batch_norm call → mean and unbiased variance of this microbatch, float32 [channels]."""
        self.hits: tuple[int, int] | None = None
        """Targets of an evaluation that are predicted right, and that count; None: the loss has no such."""


def dropout(here: Pass, _name: str, x: Tensor, probability: float, operator: int) -> Tensor:
    """Zero elements with `probability`, scale the rest; `operator`: number of the dropout in the program."""
    _check_draws(probability, operator)
    if here.draw is None or probability == 0:
        return x
    mask = _keep_mask(here.draw, operator, probability, x)
    return x * (mask * (1.0 / (1.0 - probability))).to(x.dtype)


def attention(
    here: Pass,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    probability: float,
    is_causal: bool,
    operator: int,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention with dropout on its weights, by the formula; [..., heads, length, size].

    Without dropout it is torch's own, fused where the device can.
    """
    _check_draws(probability, operator)
    if here.draw is None or probability == 0:
        return F.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if mask is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        # As torch's own: a query that may attend to nothing (padding) gets zeros, and sends no gradient back.
        blind = (scores == -math.inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return dropout(here, name, weights, probability, operator) @ value


def batch_norm(
    here: Pass,
    name: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    epsilon: float,
) -> Tensor:
    """BatchNorm over all dimensions but the second, in training by the microbatch's own statistics, which are
    kept.

    The running values change at the commit of the step, by `momentum` (worker/holding/running_statistics.py).
    """
    _check_rates(momentum, epsilon)
    if here.draw is None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, epsilon)
    if is_one_value(x.shape):
        raise ValueError("a BatchNorm over one value for each channel has no variance")
    # With momentum 1 the "new running values" are this microbatch's own mean and unbiased variance.
    zeros = torch.zeros_like(running_mean)
    result, _, _, mean, variance = aten._native_batch_norm_legit_functional(  # noqa: SLF001 (has no public name)
        x, weight, bias, zeros, zeros, True, 1.0, epsilon
    )
    here.statistics[name] = (mean.detach(), variance.detach())
    return result  # type: ignore[no-any-return]


def is_one_value(shape: Sequence[int]) -> bool:
    """Whether a tensor [samples, channels, …] has one value for each channel."""
    return math.prod(shape[:1]) * math.prod(shape[2:]) == 1


FAMILY: Mapping[str, Operator] = {
    DROPOUT: Operator(dropout, in_pass=True),
    ATTENTION: Operator(attention, in_pass=True),
    BATCH_NORM: Operator(batch_norm, in_pass=True),
}


def _keep_mask(draw: Draw, operator: int, probability: float, like: Tensor) -> Tensor:
    if is_abstract(like):
        return torch.empty_like(like, dtype=torch.bool)
    if like.device.type == "cpu":
        mask = torch.from_numpy(random_draws.keep_mask(draw, operator, probability, like.numel()))
    else:
        mask = philox.keep_mask(draw, operator, probability, like.numel(), like.device)
    return mask.view(like.shape)


def _check_draws(probability: float, operator: int) -> None:
    """Raise ValueError for bad arguments even without a draw: a dry run must refuse what a real one would."""
    if type(probability) not in (int, float) or not 0 <= probability < 1:
        raise ValueError(f"dropout takes a probability in [0, 1), not {probability!r}")
    if type(operator) is not int or not 0 <= operator < MAX_OPERATORS:
        raise ValueError(f"dropout takes the number of an operator, not {operator!r}")


def _check_rates(momentum: float, epsilon: float) -> None:
    if type(momentum) is not float or not 0 <= momentum <= 1:
        raise ValueError(f"BatchNorm takes a momentum in [0, 1], not {momentum!r}")
    if type(epsilon) not in (int, float) or not 0 <= epsilon < math.inf:
        raise ValueError(f"BatchNorm takes an epsilon from 0, not {epsilon!r}")
