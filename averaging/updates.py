"""The update rule: AdamW over flat float32 vectors, with equal bits wherever it runs.

All holders of a block apply the committed gradient on their own and must end with equal bits (the next vote compares
hashes). So the update is a chain of single IEEE-754 operations, each a torch call of its own: fused ones (addcmul,
addcdiv, lerp, foreach) may or may not contract to a multiply-add, depending on the processor. Two calls that are not
what they seem are avoided as well: division by a scalar (CUDA multiplies by the reciprocal) and the float32 square root
(torch takes it from MKL on some processors, and there it is not correctly rounded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.stages.execution.numerics import float32, power

CHUNK = 1 << 16
"""Elements updated at a time: what one chunk needs (2 MiB) stays in a core's cache. The bits do not depend on it."""


class AdamWSettings(BaseModel):
    """Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019); names as in the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    learning_rate: Annotated[float, Field(gt=0, le=10)]
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    epsilon: Annotated[float, Field(gt=0, le=1)]
    weight_decay: Annotated[float, Field(ge=0, le=1)]
    """Applied to every parameter."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, float | tuple[float, ...]]) -> AdamWSettings:
        """Settings as they stand in a manifest. Raises `LocalError` HP-CFG-010 naming the wrong one."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            raise LocalError(
                "HP-CFG-010",
                f"the optimizer's {'.'.join(map(str, first['loc']))} cannot be used",
                why=first["msg"],
                fix="correct the optimizer in the run's manifest",
                exit_code=ExitCode.CONFIG,
            ) from error


class AdamW:
    """The rule for one set of settings; it holds no state of its own."""

    def __init__(self, settings: AdamWSettings) -> None:
        self.settings = settings

    def apply(
        self,
        *,
        parameters: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
        coefficient: float,
        step: int,
    ) -> None:
        """Update number `step` (from 1), in place in the first three; `gradient` is left as it is.

        The four are 1-D float32 tensors of one length on one device. The gradient counts `coefficient` times
        (global-norm clipping). Deterministic to the bit for equal inputs.
        """
        scalars = _Scalars(self.settings, coefficient, step)
        with torch.no_grad():
            for begin in range(0, len(parameters), CHUNK):
                part = slice(begin, begin + CHUNK)
                _update(scalars, parameters[part], exp_avg[part], exp_avg_sq[part], gradient[part])


class _Scalars:
    """One step's scalars: computed in Python's float64, each rounded to float32 once."""

    def __init__(self, settings: AdamWSettings, coefficient: float, step: int) -> None:
        beta1, beta2 = settings.betas
        correction1, correction2 = 1.0 - power(beta1, step), 1.0 - power(beta2, step)
        self.coefficient = float32(coefficient)
        self.keep = float32(1.0 - settings.learning_rate * settings.weight_decay)
        self.blend1 = float32(1.0 - beta1)
        self.beta2 = float32(beta2)
        self.blend2 = float32(1.0 - beta2)
        self.unbias2 = float32(1.0 / math.sqrt(correction2))
        self.epsilon = float32(settings.epsilon)
        self.minus_rate = float32(-settings.learning_rate / correction1)


def _update(
    scalars: _Scalars,
    parameters: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """The rule on one chunk; t is the step. Each line's comment is the formula it rounds as torch does."""
    gradient = gradient * scalars.coefficient
    parameters.mul_(scalars.keep)
    # m ← m + (1 - β1) (g - m)
    exp_avg.add_((gradient - exp_avg).mul_(scalars.blend1))
    # v ← β2 v + (1 - β2) g²
    gradient.mul_(gradient).mul_(scalars.blend2)
    exp_avg_sq.mul_(scalars.beta2).add_(gradient)
    # p ← p - rate / (1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε)
    denominator = _sqrt(exp_avg_sq).mul_(scalars.unbias2).add_(scalars.epsilon)
    parameters.add_((exp_avg / denominator).mul_(scalars.minus_rate))


def _sqrt(vector: torch.Tensor) -> torch.Tensor:
    """The correctly rounded float32 square root, whatever library computes it.

    The root of a 24-bit number is at least 4 units in the last place of float64 away from any midpoint between two
    float32 (their squares are multiples of 2^-48), so a float64 root that is off by one still rounds to the right one.
    """
    return vector.double().sqrt_().float()
