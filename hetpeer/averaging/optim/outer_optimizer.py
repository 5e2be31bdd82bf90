"""The outer optimizer of grouped runs: what an averaging does besides taking the mean.

DiLoCo (Douillard et al., 2023, algorithm 1): the mean distance that the clusters have moved since they last
averaged is taken as a gradient, and Nesterov momentum follows it. In DiLoCo all clusters average together;
here those average that are ready, so each cluster starts from its own parameters after its last averaging,
its *anchor*. If all clusters are in every group the two are the same. If not, differences between clusters
shrink from one averaging to the next as long as rate and momentum are those of a stable heavy ball
(docs/averaging.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

from hetpeer.averaging.optim.update_rule import CHUNK, checked
from hetpeer.stages.block.exact_scalars import float32
from hetpeer.stages.block.parameter_groups import Settings


class NesterovSettings(BaseModel):
    """Settings as in the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    learning_rate: Annotated[float, Field(gt=0, le=2)]
    momentum: Annotated[float, Field(ge=0, lt=1)]


def outer_of(values: Settings) -> OuterNesterov:
    """The rule with these settings. Raises `LocalError` HP-RUN-001 naming the wrong one."""
    return OuterNesterov(checked(NesterovSettings, values))


class OuterNesterov:
    """Torch's SGD with Nesterov momentum, whose gradient is `outer_anchor` minus the mean. Holds no state."""

    def __init__(self, settings: NesterovSettings) -> None:
        self.settings = settings

    def begin(self, *, parameters: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """A run's first parameters are as if everybody had averaged."""
        state["outer_anchor"].copy_(parameters)

    def apply(self, *, parameters: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Turn `parameters`, the mean, into the cluster's next parameters, in place.

        `outer_anchor` and `outer_momentum` of `state` are updated in place too. All are 1-D float32 tensors
        of one length on one device. Deterministic to the bit for equal inputs (update_rule.py).
        """
        minus_rate, momentum = float32(-self.settings.learning_rate), float32(self.settings.momentum)
        anchors, moments = state["outer_anchor"], state["outer_momentum"]
        with torch.no_grad():
            for begin in range(0, len(parameters), CHUNK):
                part = slice(begin, begin + CHUNK)
                # g = a - p; b ← μ b + g; p, a ← a - rate · (g + μ b)
                move = anchors[part] - parameters[part]
                moments[part].mul_(momentum).add_(move)
                move.add_(moments[part] * momentum)
                anchors[part].add_(move.mul_(minus_rate))
                parameters[part].copy_(anchors[part])
