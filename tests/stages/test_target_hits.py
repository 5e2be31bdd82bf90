"""Targets that a model predicts right: counted from the last block's only cross entropy, in evaluations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hetpeer.stages.block.block import Block
from hetpeer.stages.block.target_hits import Predictions
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.operators.chunked_loss import LINEAR_LOSS
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.passes import large_losses
from hetpeer.stages.tracing.trace import trace

IGNORED = 2


class Classifier(nn.Module):
    """A linear layer and a loss; `kind` says which."""

    def __init__(self, kind: str = "plain", classes: int = 5) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.layer(x.tanh())
        if self.kind == "pixels":  # [samples, classes, pixels]
            return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED)
        if self.kind == "log":
            return F.nll_loss(
                F.log_softmax(logits, -1).flatten(0, -2), labels.flatten(), ignore_index=IGNORED
            )
        if self.kind == "sum":
            flat = F.cross_entropy(
                logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED
            )
            return flat.sum() / flat.numel()
        if self.kind == "two":
            other = F.cross_entropy(2 * logits.flatten(0, -2), labels.flatten())
            return other + F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        if self.kind == "soft":
            return F.cross_entropy(logits.flatten(0, -2), F.one_hot(labels.flatten(), 5).float())
        if self.kind == "usual":
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        if self.kind == "none":
            return logits.square().mean() + 0 * labels.sum()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def made(kind: str, samples: int = 6) -> tuple[Classifier, BlockSpec, Block, dict[str, Tensor]]:
    torch.manual_seed(3)
    model = Classifier(kind)
    labels = torch.randint(0, 5, (samples, 7))
    if kind == "usual":
        labels = labels.where(labels != IGNORED, -100)
    batch = {"x": torch.randn(samples, 7, 4), "labels": labels}
    dag = trace(model, batch)
    (spec,) = cut_blocks(dag, 1)
    return model, spec, Block(spec, dag.tensors, dag.tensors, {}, torch.device("cpu")), batch


def expected(model: Classifier, batch: dict[str, Tensor], ignored: int = IGNORED) -> tuple[int, int]:
    right = model.layer(batch["x"].tanh()).argmax(-1) == batch["labels"]
    counts = batch["labels"] != ignored
    return int((right & counts).sum()), int(counts.sum())


def evaluated(block: Block, batch: dict[str, Tensor]) -> tuple[Pass, dict[str, Tensor]]:
    here = Pass(None)
    with torch.no_grad():
        found = block.forward({}, batch, len(batch["x"]), here)
    return here, found


@pytest.mark.parametrize("kind", ["plain", "pixels", "log", "sum"])
def test_hits_are_the_targets_with_the_largest_logit(kind: str) -> None:
    model, spec, block, batch = made(kind)
    here, found = evaluated(block, batch)
    assert here.hits == expected(model, batch)
    assert 0 < here.hits[0] < here.hits[1] < 42
    assert found.keys() == spec.outputs.keys()


@pytest.mark.parametrize("kind", ["plain", "pixels"])
def test_training_counts_nothing_and_has_the_same_loss(kind: str) -> None:
    _, spec, block, batch = made(kind)
    _, found = evaluated(block, batch)
    here = Pass(Draw(0, 0, 0, 1))
    trained = block.forward({}, batch, len(batch["x"]), here)
    assert here.hits is None
    assert spec.loss is not None
    assert torch.equal(trained[spec.loss].detach(), found[spec.loss])


@pytest.mark.parametrize("kind", ["two", "soft", "none"])
def test_no_accuracy_where_it_is_not_clear_what_is_predicted(kind: str) -> None:
    _, _, block, batch = made(kind)
    here, _ = evaluated(block, batch)
    assert here.hits is None


def test_a_loss_that_makes_its_logits_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_losses, "LARGE", 64)  # bytes of logits: 3 rows at a time
    model, spec, block, batch = made("usual")
    assert [node.op for node in spec.nodes if "cross" in node.op] == [LINEAR_LOSS]
    here, _ = evaluated(block, batch)
    assert here.hits == expected(model, batch, -100)


def test_only_the_last_block_predicts() -> None:
    _, spec, _, _ = made("plain")
    assert Predictions.of(spec) is not None
