"""Operators of convolutional models: standardised weights, windows as columns, places that a mask chooses."""

import pytest
import torch
from torch import nn

from hetpeer.stages.operators.guarded_operators import FAMILY as GUARDED
from hetpeer.stages.operators.indexed_operators import FAMILY as INDEXED
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.stages.split_run import assert_same_step, eager_step, split_step


class Windows(nn.Module):
    """A convolution whose weight is standardised, windows as columns and back, and pixels put by a mask."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, 3, 3))
        self.mixed = nn.Linear(24, 24)
        self.token = nn.Parameter(torch.randn(6))

    def forward(self, x):
        rows = self.weight.reshape(1, 6, -1)
        rows = nn.functional.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6)
        x = nn.functional.conv2d(x, rows.reshape_as(self.weight), padding=1)
        x = nn.functional.interpolate(x, size=(10, 10), mode="bicubic")
        x = nn.functional.interpolate(x, size=(8, 8), mode="bicubic", antialias=True)
        columns = nn.functional.unfold(x, 2, stride=2)
        columns = self.mixed(columns.transpose(1, 2)).transpose(1, 2)
        columns = torch.concatenate([columns[:, :12], columns[:, 12:]], dim=1)
        found = nn.functional.fold(columns, x.shape[-2:], 2, stride=2)
        mask = (torch.arange(8) % 2 == 0).expand(found.shape)
        tail = found[-x.shape[0] :]
        return found.masked_scatter(mask, self.token * tail.permute(0, 2, 3, 1)).square().mean()


def test_such_a_model_is_the_eager_one():
    torch.manual_seed(3)
    model, batches = Windows(), [{"x": torch.randn(samples, 3, 8, 8)} for samples in (4, 3)]
    dag = trace(model, batches[0])
    assert dag.dynamic
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches), 1e-5)


def test_a_mask_with_more_places_than_elements_is_refused():
    run = INDEXED["aten.masked_scatter.default"].run
    x, mask = torch.zeros(2, 3), torch.tensor([True, False, True])
    assert run(x, mask, torch.arange(9.0)).tolist() == [[0, 0, 1], [2, 0, 3]]
    with pytest.raises(IndexError, match="4 places get 3 elements"):
        run(x, mask, torch.ones(3))


def test_statistics_of_the_input_alone_are_those_of_training():
    run = GUARDED["aten._native_batch_norm_legit.no_stats"].run
    x = torch.randn(1, 4, 9)
    assert run(x, None, None, True, 0.0, 1e-6)[0].equal(
        nn.functional.batch_norm(x, None, None, training=True, eps=1e-6)
    )
    with pytest.raises(ValueError, match="without running values"):
        run(x, None, None, False, 0.0, 1e-6)
