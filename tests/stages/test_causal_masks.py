"""Masks that are exactly causal become attention's flag; others stay."""

import math

import pytest
import torch
from torch import nn

from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.stages.library_models import LAYERS, MODELS, samples
from tests.stages.split_run import assert_same_step, eager_step, split_step

pytestmark = pytest.mark.xdist_group("models")

SDPA, OURS = "aten.scaled_dot_product_attention.default", "hetpeer.attention"
T = 6


def attentions(dag):
    """(whether there is a mask, whether it is causal) of each attention of a graph."""
    calls = [node for node in dag.nodes if node.op in (SDPA, OURS)]
    return [(node.args[3:4] not in ((), (None,)), (*node.args, False, False)[5] is True) for node in calls]


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.proof)])
def test_transformers_causal_attention_has_no_mask(name):
    """As in its eager module, which leaves the mask out where it is not traced."""
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model, batches = MODELS[name](), [samples("plain", 4), samples("plain", 3)]
    dag = trace(model, batches[0])
    assert attentions(dag) == [(False, True)] * LAYERS
    assert not any(node.op == "aten.tril.default" or "logical" in node.op for node in dag.nodes)
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches), 1e-5)


class Attention(nn.Module):
    """Attention of one head with a mask of its own."""

    def __init__(self, mask, dropout):
        super().__init__()
        self.inner = nn.Linear(8, 24)
        self.mask, self.dropout = mask, dropout
        self.register_buffer("kept", torch.ones(T, T, dtype=torch.bool).tril())

    def forward(self, x):
        query, key, value = self.inner(x).unsqueeze(1).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, self.mask(self, x), self.dropout
        )
        return mixed.square().mean()


def lower(diagonal=0):
    return torch.ones(T, T, dtype=torch.bool).tril(diagonal)


MASKS = {
    "causal": (lambda _, x: lower(), True),
    "for each sample": (lambda _, x: lower().expand(x.shape[0], 1, T, T), True),
    "additive": (lambda _, x: torch.zeros(T, T).masked_fill(~lower(), -math.inf), True),
    "least float": (lambda _, x: torch.full((T, T), torch.finfo(torch.float32).min).triu(1), True),
    "buffer": (lambda self, x: self.kept, True),
    "part of a buffer": (lambda self, x: self.kept[None, :T, :T], True),
    "sees one ahead": (lambda _, x: lower(1), False),
    "window": (lambda _, x: lower() & ~lower(-3), False),
    "hides a little": (lambda _, x: torch.full((T, T), -5.0).triu(1), False),
    "of the sample": (lambda _, x: lower() & (x[:, None, None, :, 0] > -9), False),
    "one for all": (lambda _, x: torch.ones(1, 1, dtype=torch.bool), False),
}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_is_left_out_if_it_is_exactly_causal(kind, dropout):
    torch.manual_seed(5)
    mask, flagged = MASKS[kind]
    model, data = Attention(mask, dropout), {"x": torch.randn(4, T, 8)}
    dag = trace(model, data)
    assert attentions(dag) == [(not flagged, flagged)]
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]), 1e-5)
