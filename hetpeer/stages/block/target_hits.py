"""Targets that a model predicts right, counted in evaluations: those whose logit is the largest one.

They follow from the only cross entropy in the last block, so blocks and manifests need not name them, and
training computes nothing more (docs/watching.md, "What is evaluated").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hetpeer.stages.graph.block_spec import BlockSpec, OperatorCall, Ref
from hetpeer.stages.operators.chunked_loss import LINEAR_LOSS, logits_of, parts_of

LOSSES = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
"""Losses with the arguments (input, target, weight=None, reduction=mean, ignore_index=-100, …)."""
IGNORED = -100

Hits = tuple[int, int]
"""Targets that are predicted right, and targets that count."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Values of the last block that tell what the model predicts, and the target that is ignored."""

    logits: str
    """Logits; with a `weight` the input of the linear layer that makes them."""
    target: str
    ignored: int
    weight: str | None = None
    rows: int = 0
    """With a `weight`: rows whose logits are made at a time."""

    @classmethod
    def of(cls, spec: BlockSpec) -> Predictions | None:
        """The predictions of a block; None unless it is the last one and has exactly one cross entropy."""
        losses = [node for node in spec.nodes if node.op in (*LOSSES, LINEAR_LOSS)]
        return _of_call(losses[0]) if spec.loss is not None and len(losses) == 1 else None

    @property
    def names(self) -> frozenset[str]:
        """The values that `hits` reads."""
        return frozenset({self.logits, self.target} | ({self.weight} if self.weight else set()))

    def hits(self, values: Mapping[str, Tensor]) -> Hits | None:
        """Count the targets of a microbatch; None if they are no classes, but probabilities."""
        logits, target = values[self.logits].detach(), values[self.target]
        if target.is_floating_point():
            return None
        counts = target != self.ignored
        if self.weight is None:
            right = (logits.argmax(1 if logits.dim() > 1 else 0) == target) & counts
            return int(right.sum()), int(counts.sum())
        weight = values[self.weight].detach()
        found = sum(
            int(((logits_of(logits[part], weight).argmax(1) == target[part]) & counts[part]).sum())
            for part in parts_of(len(logits), self.rows)
        )
        return found, int(counts.sum())


def ignored_target(node: OperatorCall) -> int | None:
    """The target that a call of `LOSSES` ignores; None if it is no number."""
    given = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", IGNORED)
    return given if isinstance(given, int) else None


def _of_call(node: OperatorCall) -> Predictions | None:
    """The predictions that a loss compares with its targets; None if these are constants."""
    if node.op == LINEAR_LOSS:
        x, weight, target, ignored, rows = node.args
    else:
        (x, target), ignored, weight, rows = node.args[:2], ignored_target(node), None, 0
    if not isinstance(x, Ref) or not isinstance(target, Ref) or not isinstance(ignored, int):
        return None
    of_layer = weight.name if isinstance(weight, Ref) else None
    return Predictions(x.name, target.name, ignored, of_layer, rows if isinstance(rows, int) else 0)
