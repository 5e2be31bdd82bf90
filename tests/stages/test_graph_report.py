"""What blocks cost: FLOPs as torch counts them on the author's module, bytes as they add up, seconds as
they pass.
"""

import statistics
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.examples.gpt import GPT
from hetpeer.stages.block.block import run_range
from hetpeer.stages.block.device import efficiency, measure_flops
from hetpeer.stages.graph.block_spec import OperatorCall, Ref, TensorSpec
from hetpeer.stages.graph.graph_cost import block_cost, call_flops, tied_parameters
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.amounts import mostly_proof
from tests.stages.split_run import CPU, draw, received
from tests.stages.zoo import HERE, ZOO, zoo

pytestmark = pytest.mark.xdist_group("zoo")


def eager_flops(model, data):
    """Forward and backward, by torch. It has no formula for the CPU's own attention and recurrent kernels."""
    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),
        FlopCounterMode(display=False) as counter,
    ):
        loss = model.train()(**data)
        forward = counter.get_total_flops()
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("name", mostly_proof(ZOO, HERE))
def test_flops_are_those_of_the_eager_module(name):
    model, dag, microbatches = zoo(name)
    costs = [block_cost(spec) for spec in cut_blocks(dag)]
    counted = [operator for cost in costs for operator in cost.operators if operator.formula]
    forward, backward = eager_flops(model, microbatches[0])
    assert sum(operator.flops_forward for operator in counted) == pytest.approx(forward, rel=0.05)
    assert sum(operator.flops_backward for operator in counted) == pytest.approx(backward, rel=0.05)


@pytest.mark.parametrize(
    "name",
    mostly_proof(
        ["gpt", "resnet", "transformers llama", "encoder", "recurrent"],
        ["gpt", "resnet", "transformers llama"],
    ),
)
def test_operators_without_a_formula_hardly_count(name):
    model, dag, microbatches = zoo(name)
    total = sum(c.flops_forward + c.flops_backward for c in map(block_cost, cut_blocks(dag)))
    assert total == pytest.approx(sum(eager_flops(model, microbatches[0])), rel=0.05)


@pytest.mark.parametrize("name", mostly_proof(ZOO, HERE))
def test_a_block_is_the_sum_of_its_operators(name):
    _, dag, _ = zoo(name)
    for spec in cut_blocks(dag, 4):
        cost, full = block_cost(spec), spec.at(spec.batch)
        assert [operator.name for operator in cost.operators] == [node.name for node in spec.nodes]
        assert cost.flops_forward == spec.flops_forward
        assert cost.flops_backward == sum(operator.flops_backward for operator in cost.operators)
        assert sum(operator.parameter_bytes for operator in cost.operators) == spec.parameter_bytes
        kept = sum(operator.kept_bytes for operator in cost.operators)
        statistics_ = sum(tensor.nbytes for tensor in spec.statistic_specs.values())
        assert cost.activation_bytes == sum(cost.enters.values()) + statistics_ + kept
        assert cost.leaves == {name: tensor.nbytes for name, tensor in full.outputs.items()}
        flowing = {*full.inputs, *full.data, *(node.name for node in full.nodes)}
        for operator, node in zip(cost.operators, spec.nodes, strict=True):
            assert operator.reads.keys() == flowing & set(node.references())


def specs(*shapes, grad=True):
    return {
        name: TensorSpec(shape=s, dtype="float32", grad=grad) for name, s in zip("abc", shapes, strict=False)
    }


def flops(op, values, *args):
    return call_flops(OperatorCall(name="y", op=op, args=(*map(Ref, values), *args), kwargs={}), values)


def test_a_product_counts_once_for_each_factor_that_gets_a_gradient():
    both, first = specs((4, 8), (8, 16)), {**specs((4, 8)), "b": TensorSpec(shape=(8, 16), dtype="float32")}
    product = 2 * 4 * 8 * 16
    assert flops("aten.mm.default", both).backward == 2 * product
    assert flops("aten.mm.default", first).backward == product
    assert flops("aten.mm.default", specs((4, 8), (8, 16), grad=False)).backward == 0
    assert all(flops("aten.mm.default", values).forward == product for values in (both, first))


def test_other_operators_count_what_they_make():
    assert flops("aten.tanh.default", specs((4, 8))).forward == 32
    assert flops("aten.tanh.default", specs((4, 8))).backward == 32
    assert flops("aten.add.Tensor", specs((4, 8), (8,))).backward == 32 + 8
    assert flops("aten.transpose.int", specs((4, 8)), 0, 1).backward == 0
    assert not flops("aten.tanh.default", specs((4, 8))).formula
    assert flops("aten.argmax.default", specs((4, 8))).backward == 0


def test_the_first_layer_sends_no_gradient_to_the_data():
    _, dag, _ = zoo("mlp")
    (block,) = cut_blocks(dag, 1)
    first, second, *_ = (operator for operator in block_cost(block).operators if operator.formula)
    assert first.flops_backward == first.flops_forward
    assert second.flops_backward == 2 * second.flops_forward


def test_no_gradient_is_computed_where_none_arrives():
    """Of the layer under no_grad, and of what only that layer needs."""
    _, dag, _ = zoo("no_grad")
    (block,) = cut_blocks(dag, 1)
    cost = {operator.name: operator.flops_backward for operator in block_cost(block).operators}
    gate = next(node for node in block.nodes if node.op == "aten.sigmoid.default")
    (under_no_grad,) = gate.references()
    assert cost[gate.name] == cost[under_no_grad] == 0
    assert sum(cost.values()) > 0


def test_recomputation_adds_a_forward_pass_to_the_backward():
    _, dag, _ = zoo("gpt")
    for plain, again in zip(cut_blocks(dag), cut_blocks(dag, mode=ComputeMode(recompute=True)), strict=True):
        before, after = block_cost(plain), block_cost(again)
        assert after.flops_backward == before.flops_backward + before.flops_forward
        assert after.activation_bytes == again.activation_bytes < before.activation_bytes
        assert [o.kept_bytes for o in after.operators] == [o.kept_bytes for o in before.operators]


def test_tied_parameters_are_named_with_their_blocks():
    blocks = cut_blocks(zoo("gpt tied, dropout")[1])
    assert tied_parameters(blocks) == {"wte.weight": [0, len(blocks) - 1]}
    assert tied_parameters(cut_blocks(zoo("gpt")[1])) == {}


def test_what_has_no_backward_pass_is_refused():
    """Its forward pass is refused on real tensors only; a block from a stranger may hold it."""
    with pytest.raises(ProtocolError, match="softmax"):
        flops("aten.softmax.int", specs((4, 8)), 5)


# ── seconds ─────────────────────────────────────────────────────────────────────────────────────────────────


def workload(model, tokens, blocks):
    """FLOPs of forward and backward of some blocks, and a function that computes them and returns its CPU
    seconds.
    """
    data = {name: torch.randint(0, 512, (2, tokens)) for name in ("tokens", "targets")}
    dag = trace(model, data)
    chosen = cut_blocks(dag)[blocks]
    held = [received(spec, dag.tensors) for spec in chosen]
    leaves = [leaf for _, parameters in held for leaf in parameters.values()]
    shapes = chosen[0].at(2).inputs.items()
    entering = {name: torch.randn(spec.sizes).requires_grad_() for name, spec in shapes}

    def run():
        began = time.thread_time()
        (out,) = run_range([block for block, _ in held], entering, data, 2, Pass(draw())).values()
        torch.autograd.grad(out, [*leaves, *entering.values()], torch.ones_like(out))
        return time.thread_time() - began

    costs = [block_cost(spec) for spec in chosen]
    return sum(cost.flops_forward + cost.flops_backward for cost in costs), run


@pytest.mark.proof
def test_efficiency_found_on_one_layer_predicts_another_model():
    """They take turns, so that a slow moment of the machine hits both."""
    torch.set_num_threads(1)
    speed = measure_flops(CPU, 0.3)
    layer_flops, layer = workload(GPT(256, 2, 4, 64, 512), 64, slice(1, 2))
    model_flops, model = workload(GPT(384, 2, 6, 96, 512), 96, slice(None))
    taken = [[layer(), model()] for _ in range(9)][1:]
    of_layer, of_model = map(statistics.median, zip(*taken, strict=True))
    share = efficiency(layer_flops, of_layer, speed)
    assert share > 0
    assert 0.5 < model_flops / (speed * share) / of_model < 2


def test_efficiency_is_a_share_of_the_matrix_products_speed():
    assert efficiency(6e12, 6.0, 2e12) == 0.5
