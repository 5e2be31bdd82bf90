"""Masks and positions that all layers read: each block computes its own, and nothing of them crosses."""

import pytest
import torch
from torch import nn

from hetpeer.bootstrap.model_checks.equivalence import check_likeness
from hetpeer.stages.graph.graph_cost import tied_parameters
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.amounts import mostly_proof
from tests.stages.library_models import LAYERS, MODELS, samples
from tests.stages.split_run import split_step

pytestmark = pytest.mark.xdist_group("models")

CASES = [
    (name, kind) for name in MODELS for kind in ("padded", "packed") if (name, kind) != ("bert", "packed")
]


@pytest.mark.parametrize(("name", "kind"), mostly_proof(CASES, [("llama", "packed"), ("bert", "padded")]))
def test_masked_and_packed_models_are_cut_as_plain_ones(name, kind):
    """And compute what the eager module does, with the same bits wherever they are cut."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = MODELS[name]()
    batches = [samples(kind, 4), samples(kind, 3)]
    dag = trace(model, batches[0])
    blocks, plain = cut_blocks(dag), cut_blocks(trace(model, samples("plain", 4)))
    assert [list(block.parameter_specs) for block in blocks] == [
        list(block.parameter_specs) for block in plain
    ]
    assert len(blocks) >= LAYERS
    assert all(len(block.outputs) == 1 for block in blocks)
    own = set(batches[0]) - {"input_ids", "labels"}
    reading = [block for block in blocks if own & block.data.keys()]
    assert len(reading) >= LAYERS
    apart = split_step(blocks, [(i, i + 1) for i in range(len(blocks))], dag.tensors, batches)
    together = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, batches)
    assert apart.loss.equal(together.loss)
    tied = tied_parameters(blocks)  # the parts of their gradients are added up in another order
    for parameter in together.gradients.keys() - tied.keys():
        assert apart.gradients[parameter].equal(together.gradients[parameter]), parameter
    check_likeness(model, batches[0], dag, blocks)


class Biased(nn.Module):
    """Layers that share a value of a parameter, eight times as wide as what leaves a layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.shared = nn.Linear(8, 64)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        bias = torch.tanh(self.shared(h))
        for layer in self.layers:
            h = torch.tanh(layer(h)) + bias.unflatten(1, (8, 8)).sum(1)
        for _ in range(2):
            h = torch.tanh(self.head(h))
        return h.square().mean()


def test_for_more_stages_layers_are_cut_anywhere_and_a_warning_says_what_they_share(caplog):
    dag = trace(Biased(), {"x": torch.randn(4, 8)})
    few = cut_blocks(dag)
    blocks = cut_blocks(dag, at_least=6)
    assert len(blocks) >= 6 > len(few)
    line = caplog.text
    assert "layers.0 to layers.5" in line
    assert "parameter 'shared." in line
    assert f"{__file__}:" in line


def test_too_many_stages_name_what_cannot_be_divided():
    from hetpeer.dht.base.errors import LocalError

    with pytest.raises(LocalError, match="HP-MODEL-005") as caught:
        cut_blocks(trace(Biased(), {"x": torch.randn(4, 8)}), at_least=1000)
    assert "places to cut" in caught.value.why
    assert "layers.0 to layers.5" in caught.value.why


class Gated(nn.Module):
    """Layers that share a value of the sample alone, made by a table of a given width, or without one."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("table", torch.randn(64, width) if width else None)

    def forward(self, x):
        shared = (x > 0 if self.table is None else torch.tanh(x @ self.table)).float().mean(1, keepdim=True)
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h)) * shared
        return h.square().mean()


@pytest.mark.parametrize(("width", "crosses"), [(0, False), (400, True)])
def test_only_what_takes_next_to_nothing_is_computed_again(width, crosses):
    blocks = cut_blocks(trace(Gated(width), {"x": torch.randn(4, 64)}), 4)
    assert any(len(block.outputs) > 1 for block in blocks) is crosses
