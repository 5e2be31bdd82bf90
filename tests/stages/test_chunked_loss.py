"""Cross entropy by parts of the rows: torch's numbers without torch's logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hetpeer.bootstrap.model_checks.equivalence import check_likeness
from hetpeer.stages.operators.chunked_loss import LINEAR_LOSS, linear_cross_entropy, parts_of
from hetpeer.stages.tracing.counted_targets import counted_targets
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from hetpeer.stages.tracing.passes import large_losses
from hetpeer.stages.tracing.trace import OpDag, trace
from hetpeer.stages.worker.memory_footprint import footprint

TOKENS, WIDTH, CLASSES = 23, 6, 11


def given(*, autocast: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, target) of which some are ignored."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=draw)
    weight = torch.randn(CLASSES, WIDTH, generator=draw)
    target = torch.randint(0, CLASSES, (TOKENS,), generator=draw)
    target[::4] = -100
    return (x.bfloat16() if autocast else x).requires_grad_(), weight.requires_grad_(), target


@pytest.mark.parametrize("rows", [1, 4, TOKENS, 1000])
def test_loss_and_gradients_are_those_of_torch(rows: int) -> None:
    x, weight, target = given()
    usual = F.cross_entropy(F.linear(x, weight), target)
    expected = torch.autograd.grad(3 * usual, (x, weight))
    ours = linear_cross_entropy(x, weight, target, -100, rows)
    found = torch.autograd.grad(3 * ours, (x, weight))
    assert ours.item() == pytest.approx(usual.item(), rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_under_autocast_products_are_in_bfloat16() -> None:
    x, weight, target = given(autocast=True)
    with torch.autocast("cpu", torch.bfloat16):
        usual = F.cross_entropy(F.linear(x, weight).float(), target)
        ours = linear_cross_entropy(x, weight, target, -100, 4)
    assert ours.item() == pytest.approx(usual.item(), rel=1e-6)
    for one, other in zip(
        torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(usual, (x, weight)), strict=True
    ):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)


def products(autograd: FlopCounterMode) -> float:
    """Products of the layer's size that were computed."""
    return autograd.get_total_flops() / (2 * TOKENS * WIDTH * CLASSES)


def test_logits_are_made_once() -> None:
    x, weight, target = given()
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, weight, target, -100, 4)
        assert products(counter) == 3
        loss.backward()
    assert products(counter) == 3
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        evaluated = linear_cross_entropy(x, weight, target, -100, 4)
    assert products(counter) == 1
    assert torch.equal(evaluated, loss.detach())


def test_a_dry_run_has_the_costs_of_a_layer_and_its_backward() -> None:
    x, weight, target = (
        tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for tensor in given()
    )
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, weight, target, -100, 4)
        assert products(counter) == 1
        gradients = torch.autograd.grad(loss, (x, weight))
    assert products(counter) == 3
    assert [one.shape for one in gradients] == [x.shape, weight.shape]


def test_recomputing_gives_the_same_bits() -> None:
    def gradients(compute: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        x, weight, target = given()
        return torch.autograd.grad(compute(x, weight, target, -100, 4), (x, weight))

    again = partial(checkpoint, linear_cross_entropy, use_reentrant=False)
    for one, other in zip(gradients(linear_cross_entropy), gradients(again), strict=True):
        assert torch.equal(one, other)


def test_a_second_backward_is_refused() -> None:
    x, weight, target = given()
    loss = linear_cross_entropy(x, weight, target, -100, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parts_are_of_about_one_length() -> None:
    assert [part.stop - part.start for part in parts_of(512, 166)] == [128] * 4
    assert [part.stop - part.start for part in parts_of(7, 3)] == [3, 3, 1]
    assert [part.stop - part.start for part in parts_of(2, 3)] == [2]


def test_a_frozen_layer_gets_no_gradient() -> None:
    x, weight, target = given()
    linear_cross_entropy(x, weight.detach(), target, -100, 4).backward()
    assert x.grad is not None


def test_without_targets_the_loss_is_not_finite() -> None:
    x, weight, target = given()
    assert linear_cross_entropy(x, weight, target.fill_(-100), -100, 4).isnan()


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(3)},
        {"weight": torch.zeros(CLASSES, WIDTH + 1)},
        {"target": torch.zeros(TOKENS + 1, dtype=torch.int64)},
        {"target": torch.zeros(TOKENS)},
        {"ignored": 0.5},
        {"x": torch.zeros(0, WIDTH), "target": torch.zeros(0, dtype=torch.int64)},
        {"rows": 0},
        {"rows": 1.0},
        {"x": torch.zeros(5000, WIDTH), "target": torch.zeros(5000, dtype=torch.int64), "rows": 1},
    ],
)
def test_arguments_of_a_stranger_are_refused(change: dict[str, object]) -> None:
    x, weight, target = given()
    arguments = {"x": x, "weight": weight, "target": target, "ignored": -100, "rows": 4} | change
    with pytest.raises((TypeError, ValueError)):
        linear_cross_entropy(**arguments)


class Words(nn.Module):
    """A language model; `style` says how its loss is written."""

    def __init__(self, style: str, classes: int = 50, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(classes, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, classes, bias=style == "bias")
        self.style = style

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.inner(self.table(ids)).tanh())
        if self.style == "sliced":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        if self.style == "padded":  # as transformers does
            shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), shifted.view(-1))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + logits.square().mean() if self.style == "read" else loss


def traced(style: str) -> tuple[Words, dict[str, Tensor], OpDag]:
    """(model, example, graph)."""
    torch.manual_seed(0)
    model, ids = Words(style), torch.randint(0, 50, (4, 9))
    example = {"ids": ids, "labels": ids.masked_fill(ids < 9, -100)}
    return model, example, trace(model, example)


@pytest.mark.parametrize("style", ["sliced", "padded", "plain"])
def test_large_losses_are_rewritten(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_losses, "LARGE", 1 << 10)
    model, example, dag = traced(style)
    assert [node.op for node in dag.nodes].count(LINEAR_LOSS) == 1
    check_likeness(model, example, dag, cut_blocks(dag))
    targets = counted_targets(dag, example)
    assert targets is not None
    labels = example["labels"] if style == "plain" else example["labels"][:, 1:]
    found = targets.weights({name: tensor.numpy() for name, tensor in example.items()})
    assert found.tolist() == (labels != -100).sum(1).tolist()


@pytest.mark.parametrize("style", ["bias", "read"])
def test_logits_that_others_need_stay(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_losses, "LARGE", 1 << 10)
    _, _, dag = traced(style)
    assert LINEAR_LOSS not in {node.op for node in dag.nodes}


def test_small_losses_stay() -> None:
    _, _, dag = traced("padded")
    assert LINEAR_LOSS not in {node.op for node in dag.nodes}


def test_the_last_stage_needs_hardly_more_than_its_weights_and_their_gradient() -> None:
    """A vocabulary of 152,000 and 1,024 tokens: the logits alone would be 622 MB. The first stage needs less:
    the gradient of its table has but the rows that the tokens name.
    """
    with torch.device("meta"):
        model = Words("padded", classes=152_000, width=512)
        ids = torch.zeros(4, 256, dtype=torch.int64)
    dag = trace(model, {"ids": ids, "labels": ids})
    blocks = cut_blocks(dag)
    stages = [blocks[begin:end] for begin, end in balanced_ranges(blocks, 2)]
    weights = [sum(block.parameter_bytes for block in stage) for stage in stages]
    first, last = (footprint(stage).peak + own for stage, own in zip(stages, weights, strict=True))
    assert last <= 1.3 * 2 * weights[1]
    assert first <= 1.3 * weights[0]
