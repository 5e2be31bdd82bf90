"""Stochastic gradient descent, with torch's semantics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from hetpeer.averaging.optim.update_rule import UpdateContext, UpdateRule
from hetpeer.stages.block.exact_scalars import float32

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hetpeer.averaging.optim.update_rule import Change


class SGD(UpdateRule):
    """SGD with the momentum of Sutskever et al. (2013), weight decay as a part of the gradient.

    The mean of several workers' updates is the update by their mean gradient, so `workers` is ignored.
    """

    describe: ClassVar[str] = "gradient descent with momentum, plain or Nesterov's"

    name: Literal["SGD"] = "SGD"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def prepare(self, now: UpdateContext) -> Change:
        scale, decay, momentum = (float32(x) for x in (now.coefficient, now.weight_decay, self.momentum))
        minus_rate = float32(-now.rate)

        def change(parameters: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
            # g ← g + λ p; b ← μ b + g; p ← p - rate · (g + μ b or b)
            move = (gradient * scale).add_(parameters * decay)
            if momentum:
                buffer = state["momentum_buffer"]
                buffer.mul_(momentum).add_(move)
                move = move.add_(buffer * momentum) if self.nesterov else buffer
            parameters.add_(move * minus_rate)

        return change
