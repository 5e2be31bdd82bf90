"""The update rules: AdamW, NAdam and SGD over flat float32 vectors, with equal bits on every machine.

All holders of a block apply the committed gradient on their own and must end with equal bits (the next vote
compares digests). So an update is a chain of single IEEE-754 operations, each a torch call of its own. Fused
calls (addcmul, addcdiv, lerp, foreach) may contract to a multiply-add or not, depending on the processor. Two
more calls are avoided: division by a scalar (CUDA multiplies by the reciprocal) and the float32 square root
(on some processors torch takes it from MKL, which does not round it correctly).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hetpeer.averaging.optim.learning_rate import factor
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.block.exact_numerics import float32, power
from hetpeer.stages.block.parameter_groups import Settings, UpdateRule

NOTHING = 1e-30
"""So small that 1 - NOTHING is 1 in float64."""
CHUNK = 1 << 16
"""Elements updated at a time: a chunk's data (2 MiB) stays in a core's cache. The bits do not depend on
it.
"""


class _Common(BaseModel):
    """Settings that every rule has, with the manifest's names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    learning_rate: Annotated[float, Field(gt=0, le=10)]
    weight_decay: Annotated[float, Field(ge=0, le=1)]
    """Applied to every parameter."""
    schedule: Annotated[tuple[tuple[float, float], ...], Field(min_length=1)] = ((1, 1.0),)
    """Knots of what multiplies the learning rate (averaging/optim/learning_rate.py)."""

    def rate(self, step: int) -> float:
        """The learning rate of update number `step`."""
        return self.learning_rate * factor(self.schedule, step)


class AdamWSettings(_Common):
    """Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019)."""

    name: Literal["AdamW"] = "AdamW"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    eps: Annotated[float, Field(gt=0, le=1)]


class NAdamSettings(_Common):
    """Settings of NAdam (Dozat 2016), with AdamW's weight decay and torch's schedule of the momentum."""

    name: Literal["NAdam"]
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    eps: Annotated[float, Field(gt=0, le=1)]
    decoupled_weight_decay: Literal[True] = True


class SGDSettings(_Common):
    """Settings of SGD as in torch: momentum by Sutskever et al. (2013), weight decay as a part of the
    gradient.
    """

    name: Literal["SGD"]
    momentum: Annotated[float, Field(ge=0, lt=1)]
    nesterov: bool = False


_Checked = TypeVar("_Checked")
_SETTINGS: TypeAdapter[AdamWSettings | NAdamSettings | SGDSettings] = TypeAdapter(
    Annotated[AdamWSettings | NAdamSettings | SGDSettings, Field(discriminator="name")]
)


def rule_of(values: Settings) -> UpdateRule:
    """The rule with these settings of a manifest. Raises `LocalError` HP-RUN-001 that names a wrong one."""
    settings = checked(_SETTINGS, {"name": "AdamW", **values})
    return SGDRule(settings) if isinstance(settings, SGDSettings) else Adam(settings)


def checked(kind: TypeAdapter[_Checked], values: Mapping[str, Any]) -> _Checked:
    """Settings that came with a manifest. Raises `LocalError` HP-RUN-001 naming the wrong one."""
    try:
        return kind.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part not in ("AdamW", "NAdam", "SGD")]
        raise LocalError(
            "HP-RUN-001",
            f"bad value in the run's settings: optimizer.{'.'.join(where) or 'name'}",
            why=first["msg"],
            fix="have the run's author correct it, and make the run again",
            exit_code=ExitCode.CONFIG,
        ) from error


class SGDRule:
    """The rule for one set of settings; the momentum is kept as `momentum_buffer`, if there is one."""

    def __init__(self, settings: SGDSettings) -> None:
        self.settings = settings

    def apply(
        self,
        *,
        parameters: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        coefficient: float,
        update: int,  # noqa: ARG002 - nothing of it is biased
        step: int,
        workers: int = 1,  # noqa: ARG002 - the mean of such updates is the update by the mean gradient
    ) -> None:
        """As `Adam.apply`."""
        one = self.settings
        scale, decay, momentum = (float32(x) for x in (coefficient, one.weight_decay, one.momentum))
        minus_rate = float32(-one.rate(step))
        buffer = state["momentum_buffer"] if momentum else gradient
        with torch.no_grad():
            for begin in range(0, len(parameters), CHUNK):
                part = slice(begin, begin + CHUNK)
                # g ← g + λ p; b ← μ b + g; p ← p - rate · (g + μ b or b)
                move = (gradient[part] * scale).add_(parameters[part] * decay)
                if momentum:
                    buffer[part].mul_(momentum).add_(move)
                    move = move.add_(buffer[part] * momentum) if one.nesterov else buffer[part]
                parameters[part].add_(move * minus_rate)


class Adam:
    """AdamW or NAdam, for one set of settings; it holds no state of its own."""

    def __init__(self, settings: AdamWSettings | NAdamSettings) -> None:
        self.settings = settings
        self._momentum = Momentum(settings.betas[0])

    def apply(
        self,
        *,
        parameters: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        coefficient: float,
        update: int,
        step: int,
        workers: int = 1,
    ) -> None:
        """Make update number `update` (from 1) at step `step` of the schedule, in place.

        `parameters`, and `exp_avg` and `exp_avg_sq` of `state`, are changed; `gradient` is not. All four are
        1-D float32 tensors of one length on one device. The gradient is multiplied by `coefficient`
        (global-norm clipping). With `workers` > 1 the second moment is taken to be that of a mean of so many
        gradients (SDPipe, section 4; docs/averaging.md). Deterministic to the bit for equal inputs.
        """
        scalars = _Scalars(self.settings, coefficient, update, step, workers)
        if isinstance(self.settings, NAdamSettings):
            scalars.look_ahead(*self._momentum.at(update), self.settings.rate(step))
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        with torch.no_grad():
            for begin in range(0, len(parameters), CHUNK):
                part = slice(begin, begin + CHUNK)
                _update(scalars, parameters[part], exp_avg[part], exp_avg_sq[part], gradient[part])


class Momentum:
    """NAdam's momentum, which rises to β1: μₜ = β1 (1 - ½ · 0.96^(0.004 t)) at update t. Products are
    cached.
    """

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


class _Scalars:
    """The scalars of one update: computed in Python's float64, each rounded to float32 once."""

    def __init__(
        self,
        settings: AdamWSettings | NAdamSettings,
        coefficient: float,
        update: int,
        step: int,
        workers: int,
    ) -> None:
        beta1, beta2 = settings.betas
        correction1, correction2 = 1.0 - power(beta1, update), 1.0 - power(beta2, update)
        rate = settings.rate(step)
        self.coefficient = float32(coefficient)
        self.keep = float32(1.0 - rate * settings.weight_decay)
        self.blend1 = float32(1.0 - beta1)
        self.beta2 = float32(beta2)
        self.blend2 = float32(1.0 - beta2)
        self.unbias2 = float32(1.0 / math.sqrt(correction2))
        self.epsilon = float32(settings.eps)
        self.minus_rate = float32(-rate / correction1)
        self.unbias1_squared = float32(correction2 / (correction1 * correction1))
        self.share = float32(1.0 / workers)
        """Share of the variance that is left in a mean of `workers`."""
        self.minus_rate_of_gradient = 0.0
        """Factor of the gradient itself, besides its running mean; 0 in AdamW."""

    def look_ahead(self, mu: float, following: float, product: float, rate: float) -> None:
        """NAdam: use the mean as it will be at the next update if the gradient stays the same."""
        self.minus_rate_of_gradient = float32(-rate * (1.0 - mu) / (1.0 - product))
        self.minus_rate = float32(-rate * following / (1.0 - product * following))


def _update(
    scalars: _Scalars,
    parameters: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Update one chunk; t is the update's number. Comments have the formula that a line rounds as torch
    does.
    """
    gradient = gradient * scalars.coefficient
    look_ahead = gradient.clone() if scalars.minus_rate_of_gradient else None
    parameters.mul_(scalars.keep)
    # m ← m + (1 - β1) (g - m)
    exp_avg.add_((gradient - exp_avg).mul_(scalars.blend1))
    # v ← β2 v + (1 - β2) g²
    gradient.mul_(gradient).mul_(scalars.blend2)
    exp_avg_sq.mul_(scalars.beta2).add_(gradient)
    # p ← p - rate / (1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε)
    second = exp_avg_sq if scalars.share == 1.0 else _of_mean(scalars, exp_avg, exp_avg_sq)
    denominator = _sqrt(second).mul_(scalars.unbias2).add_(scalars.epsilon)
    parameters.add_((exp_avg / denominator).mul_(scalars.minus_rate))
    if look_ahead is not None:
        # p ← p - rate (1 - μₜ) / (1 - Πμ) · g / (√v / √(1 - β2ᵗ) + ε); what stands above is with μₜ₊₁ / (1 -
        # Πμ μₜ₊₁) for 1 / (1 - β1ᵗ)
        parameters.add_(look_ahead.div_(denominator).mul_(scalars.minus_rate_of_gradient))


def _of_mean(scalars: _Scalars, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """Second moment of the mean of several workers' gradients, whose variance is smaller by their number.

    Unbiased: m̂² + (v̂ - m̂²) / N, with everything multiplied by 1 - β2ᵗ, as v is. An estimate of v̂ below
    m̂² means no variance.
    """
    squared_mean = (exp_avg * exp_avg).mul_(scalars.unbias1_squared)
    return (exp_avg_sq - squared_mean).clamp_(min=0.0).mul_(scalars.share).add_(squared_mean)


def _sqrt(vector: torch.Tensor) -> torch.Tensor:
    """The correctly rounded float32 square root, whatever library computes it.

    The root of a 24-bit number is at least 4 units in the last place of float64 away from any midpoint
    between two float32 (their squares are multiples of 2^-48), so a float64 root that is off by one still
    rounds to the right one.
    """
    return vector.double().sqrt_().float()
