"""The outer optimizer of grouped runs: what an averaging does besides taking the mean.

DiLoCo (Douillard et al., 2023, algorithm 1): the mean distance that the clusters have moved since they last
averaged is taken as a gradient, and Nesterov momentum follows it. In DiLoCo all clusters average together;
here those average that are ready, so each cluster starts from its own parameters after its last averaging,
its *anchor*. If all clusters are in every group the two are the same. If not, differences between clusters
shrink from one averaging to the next as long as rate and momentum are those of a stable heavy ball
(docs/averaging.md).

With sparse updates (after SparseLoCo, Sarfi et al., 2025) a cluster sends a small part of what it has moved
from its anchor. The rest stays in its own parameters, and is a part of its next movement. All clusters are in
every group then, so their anchors have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    sparse: bool = False
    """Whether clusters send only a small part of what they have moved."""


def outer_of(values: Settings) -> OuterNesterov:
    """The rule with these settings. Raises `LocalError` HP-RUN-001 naming the wrong one."""
    return OuterNesterov(checked(NesterovSettings, values))


class OuterNesterov:
    """Torch's SGD with Nesterov momentum, whose gradient is `outer_anchor` minus the mean. Holds no state.

    All tensors are 1-D float32 of one length on one device. Deterministic to the bit for equal inputs
    (update_rule.py).
    """

    def __init__(self, settings: NesterovSettings) -> None:
        self.settings = settings
        self.sparse = settings.sparse

    def begin(self, *, parameters: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """A run's first parameters are as if everybody had averaged."""
        state["outer_anchor"].copy_(parameters)

    def apply(self, *, parameters: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Turn `parameters`, the mean, into the cluster's next parameters, in place.

        `outer_anchor` and `outer_momentum` of `state` are updated in place too.
        """
        with torch.no_grad():
            for part in _chunks(parameters):
                self._step(parameters, state, part, state["outer_anchor"][part] - parameters[part])

    def moved(self, *, parameters: torch.Tensor, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The movement from the anchor, against the direction of training: a - p. What was not sent of it
        in earlier averagings is still in it.
        """
        with torch.no_grad():
            return state["outer_anchor"] - parameters

    def follow(
        self,
        *,
        parameters: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        sent: torch.Tensor,
        total: torch.Tensor,
        share: float,
    ) -> None:
        """Turn `parameters` into the cluster's next ones, in place, and update all of `state`.

        `sent` is what it has sent of `moved`; `total` · `share` is the mean that counts
        (stages/worker/movement_sums.py), 0 where nobody has sent anything. The anchor follows it. Where
        nobody has sent anything the parameters keep their distance from the anchor. Where others have, and
        not this cluster, they are on it. Where this cluster has, they are as far from it as the codec rounds.
        """
        share = float32(share)
        with torch.no_grad():
            for part in _chunks(parameters):
                rest = (state["outer_anchor"][part] - parameters[part]).sub_(sent[part])
                rest.masked_fill_(sent[part].eq(0) & total[part].ne(0), 0.0)
                self._step(parameters, state, part, total[part] * share)
                parameters[part].sub_(rest)

    def _step(
        self, parameters: torch.Tensor, state: Mapping[str, torch.Tensor], part: slice, move: torch.Tensor
    ) -> None:
        """The movement g = `move`, which is changed: b ← μ b + g; p, a ← a - rate · (g + μ b)."""
        minus_rate, momentum = float32(-self.settings.learning_rate), float32(self.settings.momentum)
        anchors, moments = state["outer_anchor"][part], state["outer_momentum"][part]
        moments.mul_(momentum).add_(move)
        move.add_(moments * momentum)
        anchors.add_(move.mul_(minus_rate))
        parameters[part].copy_(anchors)


def _chunks(vector: torch.Tensor) -> Iterator[slice]:
    return (slice(begin, begin + CHUNK) for begin in range(0, len(vector), CHUNK))
