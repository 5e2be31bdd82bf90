"""A model in blocks is the model: same loss, same gradients, whoever holds which block; gradients may be
given.
"""

import os
import subprocess
import sys
import weakref

import pytest
import torch

from hetpeer.bootstrap.model_checks.drawn_dropout import DrawnDropout
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.block import Block, backpropagate, flat_views, run_range
from hetpeer.stages.operators.own_operators import Pass, attention
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from tests.amounts import mostly_proof
from tests.stages.models import SIZES, SMALL, gpt, small
from tests.stages.split_run import CPU, assert_same_step, draw, eager_step, received, split_step

pytestmark = pytest.mark.xdist_group("models")


@pytest.mark.parametrize("size", mostly_proof(SIZES, ["default", "deep"]))
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_split_gpt_equals_the_eager_module(size, stages):
    model, dag, data = gpt(size)
    blocks = cut_blocks(dag)
    split = split_step(blocks, balanced_ranges(blocks, stages), dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]))


@pytest.mark.parametrize("target", [3, 9, 15, 40])
def test_every_block_alone_equals_the_eager_module(target):
    model, dag, data = gpt("default")
    blocks = cut_blocks(dag, target)
    split = split_step(blocks, [(i, i + 1) for i in range(len(blocks))], dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]))


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("target", [1, 2, 4, 100])
def test_skips_frozen_parameters_and_grad_regions_equal_the_eager_module(kind, target):
    model, dag, data = small(kind)
    blocks = cut_blocks(dag, target)
    split = split_step(blocks, [(i, i + 1) for i in range(len(blocks))], dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]))


@pytest.mark.parametrize("additive", [False, True])
def test_who_may_look_at_nothing_gets_what_torch_gives_with_dropout_too(additive):
    """Padding: a row of the mask without anything. Zeros, and no gradient; not NaN."""
    torch.manual_seed(3)
    whole = [torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    if additive:
        mask = torch.zeros(4, 4).masked_fill(~mask, -torch.inf)
    with DrawnDropout(draw()):
        eager = torch.nn.functional.scaled_dot_product_attention(*whole, mask, 0.25)
    ours = attention(Pass(draw()), "attention", *whole, mask, 0.25, False, 0)
    assert torch.equal(ours[:, :, 2], torch.zeros(2, 2, 8))
    torch.testing.assert_close(ours, eager)
    seed = torch.randn_like(ours)
    for mine, theirs in zip(*(torch.autograd.grad(out, whole, seed) for out in (ours, eager)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_grad_mode_is_the_callers():
    _, dag, data = gpt("default")
    blocks = [received(spec, dag.tensors)[0] for spec in cut_blocks(dag)]
    with torch.no_grad():
        (loss,) = run_range(blocks, {}, data, 3, Pass(draw())).values()
    assert not loss.requires_grad


def test_intermediate_values_are_freed_as_soon_as_they_can_be():
    """Under no_grad nothing but the residual and one operator's tensors may be alive at any time."""
    _, dag, _ = gpt("default")
    spec = cut_blocks(dag)[1]
    block, _ = received(spec, dag.tensors)
    alive = most = 0

    def died() -> None:
        nonlocal alive
        alive -= 1

    def observe(node, result):
        nonlocal alive, most
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            weakref.finalize(tensor, died)
            alive += 1
        most = max(most, alive)

    entering = {name: torch.randn(tensor.sizes) for name, tensor in spec.at(3).inputs.items()}
    values = {**entering, **{name: dag.tensors[fqn] for name, fqn in spec.parameters.items()}}
    with torch.no_grad():
        out = block._at(3)[1].run(values, Pass(draw()), observe)
    assert most <= 7  # q, k and v at once, their parts and views
    assert len(spec.nodes) > 3 * most
    assert out.keys() == spec.outputs.keys()


def test_flat_views_share_memory_in_the_order_of_the_spec():
    _, dag, _ = gpt("default")
    spec = cut_blocks(dag)[1]
    flat = torch.arange(spec.parameter_count, dtype=torch.float32)
    views = flat_views(spec, flat)
    assert list(views) == list(spec.parameter_specs)
    assert torch.cat([view.flatten() for view in views.values()]).equal(flat)
    flat.zero_()
    assert not any(view.any() for view in views.values())
    for wrong in (flat[1:], flat.double(), flat.view(-1, 1)):
        with pytest.raises(ProtocolError, match="float32 values"):
            flat_views(spec, wrong)


def test_gradients_may_gather_in_one_flat_vector():
    """What the worker does: gradient views set beforehand, so that backward adds into the flat vector."""
    model, dag, data = gpt("default")
    (spec,) = cut_blocks(dag, 1)
    block, parameters = received(spec, dag.tensors)
    flat = torch.zeros(spec.parameter_count)
    for fqn, view in flat_views(spec, flat).items():
        parameters[fqn].grad = view
    for _ in range(2):
        block.forward({}, data, 3, Pass(draw()))[spec.loss].backward()
    gradients = eager_step(model, [data]).gradients
    expected = torch.cat([gradients[fqn].flatten() for fqn in spec.parameter_specs])
    assert (flat / 2 - expected).abs().max() <= 1e-6 * expected.abs().max()


def bundle_and_data():
    _, dag, data = gpt("default")
    specs = cut_blocks(dag)
    block, _ = received(specs[5], dag.tensors)
    (name,) = specs[5].inputs
    return block, name, torch.randn(specs[5].at(3).inputs[name].sizes), data


def test_what_does_not_fit_the_spec_is_refused():
    block, name, x, data = bundle_and_data()
    assert block.forward({name: x}, data, 3, Pass(draw()))
    for bundle, rows in [
        ({}, data),
        ({name: x[:1]}, data),
        ({name: x.double()}, data),
        ({name: x, "more": x}, data),
        ({name: x}, {}),
        ({name: x}, {"targets": data["targets"].int()}),
        ({name: x}, {"targets": torch.full_like(data["targets"], 256)}),
        ({name: x}, {"targets": torch.full_like(data["targets"], -5)}),
    ]:
        with pytest.raises(ProtocolError):
            block.forward(bundle, rows, 3, Pass(draw()))


def test_parameters_that_do_not_fit_are_refused():
    _, dag, _ = gpt("default")
    spec = cut_blocks(dag)[5]
    good = {fqn: dag.tensors[fqn] for fqn in spec.parameter_specs}
    Block(spec, good, {}, {}, CPU)
    for wrong in ({}, {**good, "lm_head.weight": good["lm_head.weight"].T}):
        with pytest.raises(ProtocolError, match=r"lm_head|missing"):
            Block(spec, wrong, {}, {}, CPU)


ALONE = """
import sys, torch
from hetpeer.stages.block.block import backpropagate
x = torch.ones(2, 2, requires_grad=True)
assert torch.equal(backpropagate([x * 3], [x], [torch.ones(2, 2)])[0], torch.full((2, 2), 3.0))
assert "sympy" not in sys.modules
"""


def test_bit_for_bit_those_of_torch():
    """Of outputs that go into each other, of several types and shapes, one of which reaches nothing."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape, **how):
        return torch.randn(*shape, generator=generator).to(**how).requires_grad_()

    x, weight, unused = made(3, 4), made(4, 5), made(2)
    outputs = [x @ weight, (x @ weight).tanh(), x.bfloat16() * 2, (x @ weight).sum()]
    outputs.append(outputs[1] * outputs[0])
    constant = torch.ones(3)
    seeds = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in (*outputs, constant)]
    found = backpropagate([*outputs, constant], [x, weight, unused], seeds)
    outputs = [x @ weight, (x @ weight).tanh(), x.bfloat16() * 2, (x @ weight).sum()]
    outputs.append(outputs[1] * outputs[0])
    expected = torch.autograd.grad(outputs, [x, weight, unused], seeds[:-1], allow_unused=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2] is None


def test_a_worker_is_spared_the_import():
    subprocess.run([sys.executable, "-c", ALONE], check=True, env=os.environ | {"PYTHONPATH": "."})
