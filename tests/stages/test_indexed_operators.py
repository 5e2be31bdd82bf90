"""Operators that group or scatter by an index: a mixture of experts, and guards."""

import pytest
import torch
from torch import nn

from hetpeer.stages.operators.indexed_operators import FAMILY
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.stages.split_run import assert_same_step, eager_step, split_step

EXPERTS = 4


class Experts(nn.Module):
    """Tokens sorted by their expert, one grouped product, and back; beside it an index that scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)
        self.weights = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        share, expert = self.gate(rows).softmax(-1).max(-1)
        order = torch.argsort(expert)
        counts = torch.histc(expert.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0).to(torch.int32)
        found = torch.ops.transformers.grouped_mm_fallback(
            rows[order], self.weights.transpose(-2, -1), offs=ends
        )
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        mixed = found[back] * share[:, None]
        chosen = torch.zeros_like(self.gate(rows)).scatter(1, expert[:, None], 1.0)
        cached = torch.cat([torch.tensor([]), mixed.square()])
        return torch.max(cached.mean(), torch.tensor(0.0)) + (chosen * self.gate(rows)).mean()


def test_a_mixture_of_experts_is_the_eager_one():
    import transformers.integrations.moe  # noqa: F401 (registers the product)

    torch.manual_seed(2)
    model, batches = Experts(), [{"x": torch.randn(samples, 5, 8)} for samples in (4, 3)]
    dag = trace(model, batches[0])
    split = split_step(cut_blocks(dag, 2), [(0, 1), (1, 2)], dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches), 1e-5)


def grouped(rows: int, *ends: int) -> torch.Tensor:
    weights = torch.arange(float(len(ends) * 6)).view(len(ends), 2, 3)
    run = FAMILY["aten._grouped_mm.default"].run
    return run(torch.ones(rows, 2), weights, torch.tensor(ends, dtype=torch.int32))


def test_rows_of_no_group_are_zeros_and_groups_may_be_empty():
    found = grouped(5, 0, 2, 3)
    assert found[:2].equal(torch.tensor([[15.0, 17.0, 19.0]] * 2))
    assert found[2].equal(torch.tensor([27.0, 29.0, 31.0]))
    assert found[3:].equal(torch.zeros(2, 3))


@pytest.mark.parametrize("ends", [(2, 1, 5), (2, 3, 6), (-1, 2, 5), (0, 0, 2**31 - 1)])
def test_ends_that_do_not_ascend_within_the_rows_are_refused(ends):
    """A kernel would read beyond its rows."""
    with pytest.raises(IndexError, match="do not ascend"):
        grouped(5, *ends)


def test_indices_that_broadcast_to_more_places_than_elements_are_refused():
    many = torch.zeros(1 << 20, dtype=torch.long)
    with pytest.raises(ValueError, match="more places"):
        FAMILY["aten.index_put.default"].run(torch.zeros(4, 4), [many[:, None], many], torch.tensor(1.0))


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.ones(4, 2), torch.ones(2, 3, 3), torch.tensor([1, 2])),
        (torch.ones(4, 2), torch.ones(1025, 2, 3), torch.arange(1025)),
        (torch.ones(4, 2), torch.ones(2, 2, 3), torch.tensor([1.0, 2.0])),
        (torch.ones(4, 2), torch.ones(2, 2, 3), torch.tensor([1, 2, 3])),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_grouped_product_refuses_other_shapes(arguments, device):
    with pytest.raises((ValueError, RuntimeError)):
        FAMILY["aten._grouped_mm.default"].run(*(argument.to(device) for argument in arguments))
