"""Loops over time in models of transformers: one scan in the graph, for any number of steps."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan

from hetpeer.bootstrap.model_checks.equivalence import check_likeness
from hetpeer.stages.operators.scan_operators import LINEAR_SCAN
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.stand_ins.time_loops import loops_as_scans
from hetpeer.stages.tracing.trace import trace
from tests.amounts import mostly_proof
from tests.stages.library_models import Loss
from tests.stages.split_run import assert_same_step, eager_step, split_step

pytestmark = pytest.mark.xdist_group("models")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODELS = {
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
    "recurrent_gemma": {"lru_width": 16, "head_dim": 8},
    "rwkv": {"context_length": 32, "attention_hidden_size": 16},
}
"""Architecture → settings of a small model, besides SIZES."""


def model_of(name):
    import transformers

    config = transformers.CONFIG_MAPPING[name](**SIZES | MODELS[name])
    return Loss(transformers.AutoModelForCausalLM.from_config(config), use_cache=False)


def samples(count, length):
    tokens = torch.randint(0, SIZES["vocab_size"], (count, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


@pytest.mark.parametrize("name", mostly_proof(MODELS, ["mamba", "rwkv"]))
def test_a_loop_over_time_is_one_scan_and_trains_as_eager(name):
    torch.set_num_threads(1)
    torch.manual_seed(8)
    model, batches = model_of(name), [samples(4, 12), samples(3, 12)]
    dag = trace(model, batches[0])
    scans = [node for node in dag.nodes if node.op == LINEAR_SCAN]
    assert scans
    assert len(dag.nodes) == len(trace(model, samples(4, 9)).nodes)
    blocks = cut_blocks(dag, at_least=2)
    middle = len(blocks) // 2
    split = split_step(blocks, [(0, middle), (middle, len(blocks))], dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches), 2e-6)
    check_likeness(model, batches[0], dag, blocks)


class Scanned(nn.Module):
    """An associative scan of torch, of a linear recurrence."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        factors = torch.sigmoid(self.weight * x)
        _, states = associative_scan(linear, (factors, x), dim=1, combine_mode="generic")
        return states.square().mean()


def linear(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def test_an_authors_associative_scan_of_a_linear_recurrence_is_a_scan():
    torch.manual_seed(9)
    data = {"x": torch.randn(3, 7, 4)}
    model = Scanned()
    dag = trace(model, data)
    assert [node.op for node in dag.nodes].count(LINEAR_SCAN) == 1
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]))


def test_torch_and_libraries_have_their_own_functions_again():
    import torch._higher_order_ops as package
    import transformers.models.rwkv.modeling_rwkv as rwkv

    before = package.associative_scan, rwkv.rwkv_linear_attention_cpu
    with loops_as_scans():
        assert package.associative_scan is not before[0]
        assert rwkv.rwkv_linear_attention_cpu is not before[1]
    assert (package.associative_scan, rwkv.rwkv_linear_attention_cpu) == before
