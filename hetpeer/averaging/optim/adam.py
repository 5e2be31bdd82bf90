"""AdamW and NAdam, with torch's semantics, and AdamW for the mean of several workers' gradients."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from hetpeer.averaging.optim.update_rule import UpdateContext, UpdateRule
from hetpeer.stages.block.exact_scalars import float32, power

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hetpeer.averaging.optim.update_rule import Change

NOTHING = 1e-30
"""A number so small that 1 - NOTHING is 1 in float64."""
SLOW_MEAN = "exp_avg_beta2"
"""First moment with the decay β2: square minus its square is a variance, as both have the same weights."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(UpdateRule):
    """AdamW (Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019)."""

    describe: ClassVar[str] = "Adam with decoupled weight decay"

    name: Literal["AdamW"] = "AdamW"
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8

    @property
    def keeps(self) -> tuple[str, ...]:
        """The moments, by torch's names."""
        return "exp_avg", "exp_avg_sq"

    @property
    def keeps_of_mean(self) -> tuple[str, ...]:
        """The first moment with the second one's weights (SDPipe, section 4)."""
        return (SLOW_MEAN,)

    def prepare(self, now: UpdateContext) -> Change:
        return _Scalars(self.betas, self.eps, now).change


class NAdam(UpdateRule):
    """NAdam (Dozat, 2016) with AdamW's weight decay and torch's schedule of the momentum.

    Nesterov's look-ahead compensates for gradients that are some updates old (Ajanthan et al., ICML 2025).
    """

    describe: ClassVar[str] = "the same with Nesterov's look-ahead, better with --staleness"

    name: Literal["NAdam"] = "NAdam"
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    decoupled_weight_decay: Literal[True] = True

    @property
    def keeps(self) -> tuple[str, ...]:
        """The moments, by torch's names."""
        return "exp_avg", "exp_avg_sq"

    @property
    def keeps_of_mean(self) -> tuple[str, ...]:
        """The first moment with the second one's weights (SDPipe, section 4)."""
        return (SLOW_MEAN,)

    def prepare(self, now: UpdateContext) -> Change:
        scalars = _Scalars(self.betas, self.eps, now)
        scalars.look_ahead(*momentum_of(self.betas[0]).at(now.update), now.rate)
        return scalars.change


class Momentum:
    """NAdam's momentum, rising to β1: μₜ = β1 (1 - ½ · 0.96^(0.004 t)) at update t. Products are cached."""

    RISE = 0.9998367253526753
    """0.96^0.004, of which powers are exact to the bit everywhere."""

    def __init__(self, beta1: float) -> None:
        self._beta1 = beta1
        self._products = [1.0]

    def at(self, update: int) -> tuple[float, float, float]:
        """μₜ, μₜ₊₁ and the product of μ₁ … μₜ."""
        products = self._products
        while len(products) <= update and products[-1] > NOTHING:
            products.append(products[-1] * self._mu(len(products)))
        return self._mu(update), self._mu(update + 1), products[min(update, len(products) - 1)]

    def _mu(self, update: int) -> float:
        return self._beta1 * (1.0 - 0.5 * power(self.RISE, update))


momentum_of = lru_cache(16)(Momentum)
"""The momentum for a β1: later updates use the products of earlier ones."""


class _Scalars:
    """The scalars of one update: computed in Python's float64, each rounded to float32 once."""

    def __init__(self, betas: tuple[float, float], eps: float, now: UpdateContext) -> None:
        beta1, beta2 = betas
        correction1, correction2 = 1.0 - power(beta1, now.update), 1.0 - power(beta2, now.update)
        self.coefficient = float32(now.coefficient)
        self.keep = float32(1.0 - now.rate * now.weight_decay)
        self.blend1 = float32(1.0 - beta1)
        self.beta2 = float32(beta2)
        self.blend2 = float32(1.0 - beta2)
        self.unbias2 = float32(1.0 / math.sqrt(correction2))
        self.epsilon = float32(eps)
        self.minus_rate = float32(-now.rate / correction1)
        self.unbias_squared = float32(1.0 / correction2)
        self.share = float32(_share_of_variance(beta2, now.update, now.workers))
        """Share of the variance that is left in a mean of `workers`; 1: v is used as it is."""
        self.minus_rate_of_gradient = 0.0
        """Factor of the gradient itself, besides its running mean; 0 in AdamW."""

    def look_ahead(self, mu: float, following: float, product: float, rate: float) -> None:
        """NAdam: use the mean as it will be at the next update if the gradient stays the same."""
        self.minus_rate_of_gradient = float32(-rate * (1.0 - mu) / (1.0 - product))
        self.minus_rate = float32(-rate * following / (1.0 - product * following))

    def change(self, parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Update one chunk at update number t. Comments have the formula that a line rounds as torch does."""
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        gradient = gradient * self.coefficient
        look_ahead = gradient.clone() if self.minus_rate_of_gradient else None
        parameters.mul_(self.keep)
        # m ← m + (1 - β1) (g - m)
        exp_avg.add_((gradient - exp_avg).mul_(self.blend1))
        if SLOW_MEAN in state:  # also after a group of one: the next one may be larger
            # s ← s + (1 - β2) (g - s)
            state[SLOW_MEAN].add_((gradient - state[SLOW_MEAN]).mul_(self.blend2))
        # v ← β2 v + (1 - β2) g²
        gradient.mul_(gradient).mul_(self.blend2)
        exp_avg_sq.mul_(self.beta2).add_(gradient)
        # p ← p - rate / (1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε)
        second = exp_avg_sq if self.share == 1.0 else self._of_mean(state[SLOW_MEAN], exp_avg_sq)
        denominator = _sqrt(second).mul_(self.unbias2).add_(self.epsilon)
        parameters.add_((exp_avg / denominator).mul_(self.minus_rate))
        if look_ahead is not None:
            # p ← p - rate (1 - μₜ) / (1 - Πμ) · g / (√v / √(1 - β2ᵗ) + ε); what stands above is with μₜ₊₁ /
            # (1 - Πμ μₜ₊₁) for 1 / (1 - β1ᵗ)
            parameters.add_(look_ahead.div_(denominator).mul_(self.minus_rate_of_gradient))

    def _of_mean(self, slow: Tensor, exp_avg_sq: Tensor) -> Tensor:
        """Second moment of the mean of several workers' gradients, whose variance is smaller by their number.

        Unbiased: ŝ² + share · (v̂ - ŝ²), with everything multiplied by 1 - β2ᵗ, as v is. Rounding may make v̂
        smaller than ŝ², which means no variance.
        """
        squared_mean = (slow * slow).mul_(self.unbias_squared)
        return (exp_avg_sq - squared_mean).clamp_(min=0.0).mul_(self.share).add_(squared_mean)


def _share_of_variance(beta2: float, update: int, workers: int) -> float:
    """Share of v̂ - ŝ² that makes ŝ² + share · (v̂ - ŝ²) the second moment of the mean of `workers` gradients.

    The paper takes 1/N. But ŝ, a weighted mean of `update` gradients, has the share κ (the sum of its squared
    weights) of their variance σ² itself: E ŝ² = mean² + κ σ², E (v̂ - ŝ²) = (1 - κ) σ². So (1/N - κ) / (1 - κ)
    is unbiased. With the paper's the result is 1 + (N - 1) κ times too large by pure noise, 1.38 times for
    N = 16 and β2 = 0.95. At least 1/(2N), so that no step gets much longer than the paper's where few
    gradients are known.
    """
    if workers == 1:
        return 1.0
    decayed = power(beta2, update)
    own = (1.0 - beta2) * (1.0 + decayed) / ((1.0 + beta2) * (1.0 - decayed))
    least = 0.5 / workers
    return least if own >= 1.0 / workers else max((1.0 / workers - own) / (1.0 - own), least)


def _sqrt(vector: Tensor) -> Tensor:
    """The correctly rounded float32 square root, whatever library computes it.

    The root of a 24-bit number is at least 4 units in the last place of float64 away from any midpoint
    between two float32 (their squares are multiples of 2^-48), so a float64 root that is off by one still
    rounds to the right one.
    """
    return vector.double().sqrt_().float()
