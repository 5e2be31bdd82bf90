"""Regions of torch.inference_mode: what they compute is not trained, as in the eager module."""

import pytest
import torch
from torch import nn

from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.stages.split_run import assert_same_step, eager_step, split_step

pytestmark = pytest.mark.xdist_group("models")


class Teacher(nn.Module):
    """A linear layer that a region of inference mode computes, and one that is trained."""

    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8), nn.Linear(8, 8)

    def encoded(self, x):
        with torch.inference_mode():
            return torch.tanh(self.frozen(x))

    def forward(self, x):
        return self.trained(self.encoded(x).clone()).square().mean()


class Decorated(Teacher):
    @torch.inference_mode()
    def encoded(self, x):
        return torch.tanh(self.frozen(x))


class Nested(Teacher):
    def encoded(self, x):
        with torch.no_grad(), torch.inference_mode(), torch.no_grad():
            return torch.tanh(self.frozen(x))


class Off(Teacher):
    """`inference_mode(False)` changes nothing where gradients are on."""

    def encoded(self, x):
        with torch.inference_mode(False):
            return torch.tanh(self.frozen(x))


@pytest.mark.parametrize(("kind", "trained"), [(Teacher, 1), (Decorated, 1), (Nested, 1), (Off, 2)], ids=str)
def test_a_region_of_inference_mode_is_not_trained(kind, trained):
    torch.manual_seed(6)
    model, data = kind(), {"x": torch.randn(4, 8)}
    dag = trace(model, data)
    assert len(dag.parameters) == 2 * trained
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]))
    with torch.inference_mode():  # torch's own again
        assert model.frozen(data["x"]).is_inference()
