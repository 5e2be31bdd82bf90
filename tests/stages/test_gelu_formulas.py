"""GELU written out with tanh becomes one operator; what only looks like it stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hetpeer.bootstrap.model_checks.equivalence import check_likeness
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.passes.gelu_formulas import GELU
from hetpeer.stages.tracing.trace import trace

SLOPE = math.sqrt(2 / math.pi)
Activation = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """An activation between two layers."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(4, 16), nn.Linear(16, 1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.fall(self.activation(self.rise(x))).square().mean()
        return loss


def ops(activation: Activation) -> list[str]:
    """Operators of the traced model, whose numbers are checked."""
    torch.manual_seed(0)
    model, example = Layer(activation), {"x": torch.randn(8, 4)}
    dag = trace(model, example)
    check_likeness(model, example, dag, cut_blocks(dag))
    return [node.op for node in dag.nodes]


def gelu_new(x: Tensor) -> Tensor:
    """As transformers has it."""
    return 0.5 * x * (1.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 3.0))))


def turned(x: Tensor) -> Tensor:
    """With all arguments in the other order."""
    return (torch.tanh((x**3 * 0.044715 + x) * 0.7978845608) + 1.0) * (x * 0.5)


@pytest.mark.parametrize("activation", [gelu_new, turned])
def test_the_formula_becomes_one_operator(activation: Activation) -> None:
    found = ops(activation)
    assert found.count(GELU) == 1
    assert "aten.tanh.default" not in found
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(activation(x), F.gelu(x, approximate="tanh"), rtol=1e-8, atol=1e-8)


def shared(x: Tensor) -> Tensor:
    """Others read the half of x."""
    half = 0.5 * x
    return half * (1.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 3.0)))) + half


@pytest.mark.parametrize(
    "activation",
    [
        shared,
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(SLOPE * (x + 0.05 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 2.0)))),
        lambda x: 0.5 * x * (2.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.4 * x * (1.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x * (1.0 + torch.sigmoid(SLOPE * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * (x + 1) * (1.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 3.0)))),
    ],
)
def test_other_formulas_stay(activation: Activation) -> None:
    assert GELU not in ops(activation)
