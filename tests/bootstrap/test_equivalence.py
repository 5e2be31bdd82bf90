"""What a trace leaves behind without a word is found before a run is made; what it keeps is not taken for
that.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss, pad
from torch.utils.checkpoint import checkpoint

from hetpeer.bootstrap.model_checks.equivalence import check_likeness
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.amounts import mostly_proof
from tests.stages.zoo import zoo

pytestmark = pytest.mark.xdist_group("zoo")

BOTH = pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])


BY_BLOCK = False
"""Whether gradients are compared as they come, as of a model that is larger than memory."""


@pytest.fixture(autouse=True, params=[False, True], ids=["at once", "block by block"])
def by_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.bootstrap.test_equivalence.BY_BLOCK", request.param)


class Net(nn.Module):
    """Two layers, and what `between` makes of the first one's output."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.side = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return mse_loss(self.last(self.between(self, h)), y) + mse_loss(self.side(h), y)


def vectors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}


def check(model: nn.Module, data: dict[str, Tensor], autocast: bool = False) -> None:
    torch.set_num_threads(1)
    dag = trace(model, data)
    blocks = cut_blocks(dag, mode=ComputeMode(autocast=autocast))
    check_likeness(model, data, dag, blocks, nullcontext() if BY_BLOCK else None)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def hooked(_: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * 0.1)
    return h * 1


def parameter_hook(model: nn.Module) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * 0.1)


def accumulated_hook(model: nn.Module) -> None:
    def shrink(weight: Tensor) -> None:
        weight.grad.mul_(0.1)

    model.first.weight.register_post_accumulate_grad_hook(shrink)


def module_hook(model: nn.Module) -> None:
    model.last.register_full_backward_hook(lambda _, into, __: tuple(g if g is None else g * 9 for g in into))


def plain(_: Any, h: Tensor) -> Tensor:
    return h * 1


@pytest.mark.parametrize("autocast", mostly_proof([False, True], [False]), ids=["float32", "bf16"])
@pytest.mark.parametrize(
    ("between", "prepare"),
    [
        (lambda _, h: Reversal.apply(h), None),
        (lambda _, h: Straight.apply(3 * h), None),
        (hooked, None),
        (plain, parameter_hook),
        (plain, accumulated_hook),
        (plain, module_hook),
    ],
    ids=["reversal", "straight-through", "tensor hook", "parameter hook", "accumulated hook", "module hook"],
)
def test_a_backward_that_does_not_travel_is_refused(
    between: Callable[[Any, Tensor], Tensor], prepare: Callable[[nn.Module], None] | None, autocast: bool
) -> None:
    model = Net(between)
    if prepare:
        prepare(model)
    with pytest.raises(LocalError, match=r"gradient of 'first\.(weight|bias)'") as caught:
        check(model, vectors(), autocast)
    assert (caught.value.code, caught.value.exit_code) == ("HP-MODEL-011", ExitCode.CONFIG)


@pytest.mark.parametrize(
    "between",
    [
        lambda _, h: 3 * h + (torch.round(3 * h) - 3 * h).detach(),
        lambda _, h: -1 * h + (2 * h).detach(),
    ],
    ids=["straight-through", "reversal"],
)
def test_what_is_advised_instead_works(between: Callable[[Any, Tensor], Tensor]) -> None:
    check(Net(between), vectors())


def test_a_loss_that_depends_on_more_than_operators_is_refused() -> None:
    calls = []

    def counting(_: nn.Module, h: Tensor) -> Tensor:
        calls.append(h)
        return h * len(calls)

    with pytest.raises(LocalError, match="loss of the first microbatch") as caught:
        check(Net(counting), vectors())
    assert caught.value.code == "HP-MODEL-011"


def test_what_volunteers_cannot_compute_in_bf16_is_refused() -> None:
    """The trace has float32's least number; bfloat16 has none so low, and its operator refuses it."""

    def padded(model: Net, h: Tensor) -> Tensor:
        scores = model.last(h)
        return pad(scores, (1, 0), value=torch.finfo(scores.dtype).min).softmax(-1)[:, 1:]

    check(Net(padded), vectors())
    with pytest.raises(LocalError, match=r"aten\.pad") as caught:
        check(Net(padded), vectors(), autocast=True)
    assert caught.value.code == "HP-MODEL-001"
    assert caught.value.fix.endswith("or let the run compute in float32")


@BOTH
def test_a_dropout_that_a_checkpoint_computes_again_has_its_mask(autocast: bool) -> None:
    def again(model: nn.Module, h: Tensor) -> Tensor:
        for _ in range(2):
            h = dropout(checkpoint(lambda x: dropout(model.last(x), 0.3), h, use_reentrant=False), 0.2)
        return h

    check(Net(again), vectors(), autocast)


@BOTH
@pytest.mark.parametrize(
    "name",
    mostly_proof(
        ["resnet", "gpt tied, dropout", "encoder", "frozen", "regions"],
        ["resnet", "gpt tied, dropout", "frozen", "regions"],
    ),
)
def test_what_travels_is_accepted_and_left_as_it_was(name: str, autocast: bool) -> None:
    model, dag, (data, *_) = zoo(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    blocks = cut_blocks(dag, mode=ComputeMode(autocast=autocast))
    check_likeness(model, data, dag, blocks, nullcontext() if BY_BLOCK else None)
    assert all(tensor.equal(before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).square().mean()


@pytest.mark.parametrize(
    ("model", "data", "part"),
    [
        (Table(sparse=True), {"x": torch.arange(4)}, "'table.weight' is sparse"),
        (Table(sparse=False), {"x": torch.tensor([0, 8])}, "test_equivalence.py"),
        (Net(lambda _, h: (h - h).sqrt()), vectors(), "norm nan"),
        (Net(lambda _, h: h / 0), vectors(), "loss nan"),
    ],
    ids=["sparse", "beyond the vocabulary", "gradient", "loss"],
)
def test_a_first_microbatch_that_trains_nothing_is_refused(
    model: nn.Module, data: dict[str, Tensor], part: str
) -> None:
    with pytest.raises(LocalError) as caught:
        check(model, data)
    assert caught.value.code == "HP-MODEL-003"
    assert part in caught.value.line()


class Fits(nn.Module):
    """A model that fits its data: the loss and its gradient are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.layer(x) * 0.0, y * 0.0)


def test_a_model_whose_gradient_is_zero_is_compared() -> None:
    check(Fits(), vectors())
