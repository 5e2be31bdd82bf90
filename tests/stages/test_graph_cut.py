"""Where the cutter cuts, and how blocks are shared out."""

import itertools
import math
import time

import pytest
import torch
from torch import nn

from hetpeer.dht.base.errors import LocalError
from hetpeer.examples.gpt import GPT
from hetpeer.stages.graph.block_spec import Batch, BlockSpec
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks, even_ranges
from hetpeer.stages.tracing.trace import trace
from tests.amounts import mostly_proof
from tests.stages.models import gpt, small

pytestmark = pytest.mark.xdist_group("models")


def assert_fits(blocks):
    """Borders match, values are used, and each parameter has exactly one block."""
    assert blocks[0].inputs == {}
    assert blocks[-1].outputs.keys() == {blocks[-1].loss}
    for before, after in itertools.pairwise(blocks):
        assert list(before.outputs.items()) == list(after.inputs.items())
        assert before.loss is None
    owned = [fqn for block in blocks for fqn in block.parameter_specs]
    assert len(owned) == len(set(owned))


@pytest.mark.parametrize("size", mostly_proof(["default", "deep", "large vocabulary"], ["default", "deep"]))
def test_gpt_is_cut_between_layers_and_one_hidden_tensor_crosses(size):
    model, dag, data = gpt(size)
    blocks = cut_blocks(dag)
    assert_fits(blocks)
    hidden = (Batch(1), data["tokens"].shape[1], model.wte.embedding_dim)
    for block in blocks[:-1]:
        assert [(spec.shape, spec.dtype, spec.grad) for spec in block.outputs.values()] == [
            (hidden, "float32", True)
        ]
    owners = [
        {fqn.split(".")[1] for fqn in block.parameter_specs if fqn.startswith("h.")} for block in blocks
    ]
    assert [owner for owner in owners if owner] == [{str(i)} for i in range(len(model.h))]
    assert list(blocks[0].data) == ["tokens"]
    assert list(blocks[-1].data) == ["targets"]
    assert sum(block.parameter_count for block in blocks) == sum(p.numel() for p in model.parameters())


def test_default_gpt_has_embedding_layers_and_head_as_blocks():
    _, dag, _ = gpt("default")
    blocks = cut_blocks(dag)
    assert len(blocks) == 6
    assert set(blocks[0].parameter_specs) == {"wte.weight", "wpe.weight"}
    assert set(blocks[5].parameter_specs) == {"ln_f.weight", "ln_f.bias", "lm_head.weight"}
    assert len({block.flops_forward for block in blocks[1:5]}) == 1


def test_activation_bytes_are_what_autograd_keeps_of_a_layer():
    """With B T tokens and width D: two norms' outputs, q k v in one, attention's output, its input to
    c_proj, twice the MLP's 4 D, the layer's input and its middle; the rest (statistics of norms and
    softmax) is small.
    """
    _, dag, data = gpt("default")
    hidden = 4 * data["tokens"].numel() * 128
    kept = cut_blocks(dag)[1].activation_bytes
    assert 14 * hidden < kept < 17 * hidden


@pytest.mark.parametrize("target", [1, 2, 3, 6, 9, 15])
def test_target_number_of_blocks_is_met(target):
    _, dag, _ = gpt("default")
    blocks = cut_blocks(dag, target)
    assert len(blocks) == target
    assert_fits(blocks)


def test_no_more_blocks_than_the_graph_has_borders():
    _, dag, _ = small("skip")
    blocks = cut_blocks(dag, 1000)
    assert_fits(blocks)
    assert len(blocks) <= len(dag.nodes)


def test_skip_passes_through_the_blocks_it_crosses():
    blocks = cut_blocks(small("skip")[1], 6)
    assert_fits(blocks)
    (skip,) = blocks[0].outputs.keys() & blocks[3].inputs.keys()
    passing = [block for block in blocks if skip in block.inputs and skip in block.outputs]
    assert len(passing) >= 3
    assert any(skip not in {name for node in block.nodes for name in node.references()} for block in passing)


class Masked(nn.Module):
    """A mask made once from nothing and used by every layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        mask = torch.ones(6, 6).tril() * 0.5
        for layer in self.layers:
            x = torch.tanh(layer(x) @ mask)
        return x.mean()


def test_values_that_depend_on_nothing_are_copied_not_sent():
    blocks = cut_blocks(trace(Masked(), {"x": torch.randn(3, 6)}))
    assert len(blocks) > 2
    assert all(len(block.outputs) == 1 for block in blocks)
    assert all(
        "aten.tril.default" in {node.op for node in block.nodes} for block in blocks if block.parameters
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).mean()


def test_a_tied_parameter_goes_by_one_name_in_each_block():
    dag = trace(Tied(), {"x": torch.randn(3, 6)})
    owned = [set(block.parameter_specs) for block in cut_blocks(dag, 2)]
    assert owned == [{"a.weight", "a.bias"}, {"a.weight", "b.bias"}]
    assert dag.state_dict["b.weight"] == "a.weight"


def block_of(flops: int) -> BlockSpec:
    names = ("inputs", "outputs", "data", "parameters", "parameter_specs", "buffers", "buffer_specs")
    empty = {name: {} for name in names}
    return BlockSpec(index=0, nodes=(), batch=1, flops_forward=flops, activation_bytes=0, loss=None, **empty)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
def test_balanced_ranges_are_the_best_of_all(weights):
    costs = [5, 1, 1, 7, 2, 2, 9, 4]
    blocks = [block_of(cost) for cost in costs]

    def score(ranges):
        times = [sum(costs[b:e]) / w for (b, e), w in zip(ranges, weights or [1.0] * 3, strict=True)]
        return max(times), sum(time * time for time in times)

    every = [[(0, i), (i, j), (j, len(costs))] for i, j in itertools.combinations(range(1, len(costs)), 2)]
    assert score(balanced_ranges(blocks, 3, weights)) == pytest.approx(min(map(score, every)))


def test_ranges_of_many_blocks_take_no_time():
    costs = [1 + (7 * i) % 31 for i in range(400)]
    began = time.process_time()
    ranges = even_ranges(costs, [1.0] * 40)
    assert time.process_time() - began < 2
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert max(sum(costs[begin:end]) for begin, end in ranges) < 1.3 * sum(costs) / 40


def test_more_stages_than_blocks_are_refused():
    for stages in (0, 3):
        with pytest.raises(LocalError, match="HP-MODEL-005"):
            balanced_ranges([block_of(1), block_of(1)], stages)


# ── cheap borders ───────────────────────────────────────────────────────────────────────────────────────────


def full_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    from hetpeer.examples.transformers_models import LanguageModel

    return LanguageModel(GPT2LMHeadModel(GPT2Config(n_layer=3))), (2, 1024, 768)


def full_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    from hetpeer.examples.transformers_models import LanguageModel

    return LanguageModel(LlamaForCausalLM(LlamaConfig(num_hidden_layers=3))), (2, 2048, 4096)


def three_layers_of_1b3():
    """All 24 are planned in benchmarks/planning.py."""
    return GPT(width=2048, layers=3, heads=16, context=2048, vocabulary=50257, tied=True), (2, 2048, 2048)


FULL_WIDTH = {"GPT-2": full_gpt2, "Llama": full_llama, "GPT 1.3B": three_layers_of_1b3}
"""Real widths, so that logits are as wide as they are; without weights.

With the shape of what leaves a layer.
"""


@pytest.mark.parametrize("name", mostly_proof(FULL_WIDTH, ["GPT 1.3B"]))
def test_no_more_crosses_than_leaves_a_layer(name):
    """However many blocks there are: up to two for each layer, its attention and its MLP, and one for each
    end.
    """
    with torch.device("meta"):
        model, hidden = FULL_WIDTH[name]()
        dag = trace(model, {key: torch.empty(hidden[:2], dtype=torch.int64) for key in ("tokens", "targets")})
    layers = len(cut_blocks(dag)) - 2
    for target in (None, 2, 3, layers, 2 * layers + 2):
        blocks = cut_blocks(dag, target)
        assert len(blocks) == (target or layers + 2)
        crossing = [sum(spec.nbytes for spec in block.at(2).outputs.values()) for block in blocks[:-1]]
        assert max(crossing) <= 4 * math.prod(hidden)


def test_logits_stay_with_their_loss():
    """Of a vocabulary that outweighs the layers too: the head is not cut, however heavy it is."""
    _, dag, data = gpt("large vocabulary")
    logits = 4 * data["tokens"].numel() * 4000
    for target in range(1, 12):
        for block in cut_blocks(dag, target)[:-1]:
            assert sum(spec.nbytes for spec in block.at(3).outputs.values()) < logits


@pytest.mark.parametrize("once", mostly_proof([True, False], [True]))
def test_layers_that_share_a_mask_of_the_inputs_are_one_block_each(once):
    """As those that make it anew are."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 16)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)
            )

        def forward(self, tokens):
            x, mask = self.table(tokens), tokens == 0
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=mask if once else tokens == 0)
            return x.square().mean()

    blocks = cut_blocks(trace(Padded(), {"tokens": torch.randint(0, 50, (4, 12))}))
    held = [{name.split(".")[1] for name in b.parameter_specs if "layers" in name} for b in blocks]
    assert max(map(len, held)) == 1
