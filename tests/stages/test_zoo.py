"""Any model, cut anywhere, is the author's eager model: loss, every gradient, every running value."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from tests.amounts import mostly_proof
from tests.stages.split_run import assert_same_step, eager_step, split_step
from tests.stages.zoo import HERE, ZOO, zoo

pytestmark = pytest.mark.xdist_group("zoo")

TOLERANCE = 1e-5


@pytest.mark.parametrize("stages", mostly_proof([1, 2, 3, 5], [3]))
@pytest.mark.parametrize("name", mostly_proof(ZOO, HERE))
def test_stages_equal_the_eager_module(name, stages):
    """Three microbatches, of which the last is smaller."""
    model, dag, microbatches = zoo(name)
    blocks = cut_blocks(dag)
    if len(blocks) < stages:
        blocks = cut_blocks(dag, stages)
    split = split_step(blocks, balanced_ranges(blocks, stages), dag.tensors, microbatches)
    assert_same_step(split, eager_step(model, microbatches), TOLERANCE)


@pytest.mark.parametrize(
    "name",
    mostly_proof(["resnet", "gpt tied, dropout", "transformers gpt2"], ["resnet", "gpt tied, dropout"]),
)
def test_recomputation_changes_no_bit(name):
    _, dag, microbatches = zoo(name)
    blocks = cut_blocks(dag, 4)
    again = cut_blocks(dag, 4, ComputeMode(recompute=True))
    assert sum(b.activation_bytes for b in again) < 0.7 * sum(b.activation_bytes for b in blocks)
    ranges = [(0, 2), (2, 4)]
    kept = split_step(blocks, ranges, dag.tensors, microbatches)
    redone = split_step(again, ranges, dag.tensors, microbatches)
    assert redone.loss.equal(kept.loss)
    for key, gradient in kept.gradients.items():
        assert redone.gradients[key].equal(gradient), key
    for key, statistic in kept.statistics.items():
        assert redone.statistics[key].equal(statistic), key


@pytest.mark.parametrize("name", ["resnet", "gpt tied, dropout"])
def test_masks_and_statistics_do_not_depend_on_the_cut(name):
    _, dag, microbatches = zoo(name)
    losses = set()
    for count in (1, 3, 8):
        blocks = cut_blocks(dag, count)
        ranges = [(i, i + 1) for i in range(len(blocks))]
        losses.add(float(split_step(blocks, ranges, dag.tensors, microbatches).loss))
    assert len(losses) == 1


def test_a_tied_parameter_lies_in_each_block_that_uses_it():
    _, dag, _ = zoo("gpt tied, dropout")
    blocks = cut_blocks(dag)
    assert "wte.weight" in blocks[0].parameter_specs
    assert "wte.weight" in blocks[-1].parameter_specs
    assert dag.state_dict["lm_head.weight"] == "wte.weight"


@pytest.mark.parametrize("name", ["gpt", "resnet", "transformers llama"])
def test_bf16_is_near_and_crosses_borders_as_bfloat16(name):
    model, dag, microbatches = zoo(name)
    blocks = cut_blocks(dag, 3, ComputeMode(autocast=True))
    crossing = [spec for block in blocks[1:] for spec in block.inputs.values()]
    assert {spec.dtype for spec in crossing} == {"bfloat16"}
    split = split_step(blocks, [(0, 1), (1, 3)], dag.tensors, microbatches)
    eager = eager_step(model, microbatches)
    assert abs(split.loss / eager.loss - 1) < 0.01
    for key, gradient in eager.gradients.items():
        assert split.gradients[key].dtype == torch.float32
        assert (split.gradients[key] - gradient).norm() < 0.3 * max(gradient.norm(), 1e-3), key


def test_what_the_author_casts_to_float32_is_float32_in_bf16():
    """A long sum: in bfloat16 its digits are gone. The trace is in float32, where the cast does nothing."""
    from hetpeer.stages.tracing.trace import trace

    class Long(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 4096)

        def forward(self, x):
            y = self.layer(x)
            with torch.no_grad():
                z = (2 * y).to(torch.float32).cumsum(-1)
            sums = (y.float().abs() + 1).cumsum(-1)
            return (sums[:, -1] - sums[:, -2] - 1).mean() + (z[:, 1:].diff() - 2 * y.detach()[:, 2:]).mean()

    torch.manual_seed(6)
    model, data = Long(), {"x": torch.randn(4, 8)}
    dag = trace(model, data, autocast=True)
    assert sum(node.op == "aten._to_copy.default" for node in dag.nodes) == 2
    split = split_step(cut_blocks(dag, 1, ComputeMode(autocast=True)), [(0, 1)], dag.tensors, [data])
    assert abs(split.loss / eager_step(model, [data]).loss - 1) < 0.01
    assert "aten._to_copy.default" not in {node.op for node in trace(model, data).nodes}


def test_masks_filled_with_the_least_float32_are_computed_in_bf16():
    """`torch.finfo(scores.dtype).min` is a constant of the trace, and beyond bfloat16."""
    from hetpeer.stages.tracing.trace import trace

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            scores = self.layer(x)
            scores = scores.masked_fill(x < 0, torch.finfo(scores.dtype).min)
            return (scores.softmax(-1) * x).sum(-1).square().mean()

    torch.manual_seed(5)
    model, data = Masked(), {"x": torch.randn(4, 8)}
    dag = trace(model, data)
    split = split_step(cut_blocks(dag, 1, ComputeMode(autocast=True)), [(0, 1)], dag.tensors, [data])
    assert abs(split.loss / eager_step(model, [data]).loss - 1) < 0.02


@pytest.mark.parametrize(
    "name",
    mostly_proof(
        ["resnet", "gpt tied, dropout", "transformers gpt2", "transformers llama", "frozen"],
        ["resnet", "gpt tied, dropout", "transformers llama", "frozen"],
    ),
)
def test_every_entry_of_the_state_dict_is_accounted_for(name):
    model, dag, _ = zoo(name)
    places = {*dag.tensors, *dag.counters, *dag.rest}
    assert {dag.state_dict[key] for key in model.state_dict()} <= places


def test_a_model_of_one_fixed_size_says_so():
    """The size of the batch is a constant of the program: no other can be computed."""
    from hetpeer.stages.tracing.trace import trace

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.bias = torch.nn.Parameter(torch.zeros(4, 8))

        def forward(self, x):
            return ((self.layer(x) + self.bias) ** 2).mean()

    dag = trace(Fixed(), {"x": torch.randn(4, 8)})
    assert not dag.dynamic
    assert cut_blocks(dag, 1)[0] == replace(cut_blocks(dag, 1)[0].at(4))


def test_a_model_of_one_fixed_size_has_that_of_its_microbatch():
    """A batch of one is traced as two where the size may stay open, and as itself where it may not."""
    from hetpeer.stages.tracing.trace import trace

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            return (self.layer(x) ** 2).sum() / float(x.shape[0])

    model, one = Fixed(), {"x": torch.randn(1, 8)}
    dag = trace(model, one)
    assert (dag.dynamic, dag.at("x").sizes) == (False, (1, 8))
    assert_same_step(split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, [one]), eager_step(model, [one]))


WITHOUT = """
import sys

for missing in ("transformers", "sklearn", "examples", "hetpeer.examples", "hivemind"):
    sys.modules[missing] = None  # an import of it fails
from pathlib import Path

import torch

from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.block.block import Block, run_range
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.graph.safety_check import unpack_block

device = torch.device("cpu")
blocks = []
for path in sorted(Path(sys.argv[1]).iterdir()):
    spec = unpack_block(path.read_bytes())
    owned = [
        {name: torch.zeros(one.sizes, dtype=getattr(torch, one.dtype)) for name, one in specs.items()}
        for specs in (spec.parameter_specs, spec.buffer_specs, spec.statistic_specs)
    ]
    blocks.append(Block(spec, *owned, device))
data = {
    name: torch.zeros(tensor.at(2).sizes, dtype=getattr(torch, tensor.dtype))
    for block in blocks
    for name, tensor in block.spec.data.items()
}
print(float(*run_range(blocks, {}, data, 2, Pass(Draw(0, 0, 0, 1))).values()))
"""


@pytest.mark.parametrize(
    "name", mostly_proof(["transformers gpt2", "transformers llama"], ["transformers llama"])
)
def test_who_has_nothing_of_the_authors_libraries_can_run_it(name, tmp_path):
    _, dag, _ = zoo(name)
    for block in cut_blocks(dag):
        (tmp_path / f"{block.index:03}").write_bytes(pack_block(block))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, tmp_path], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(math.log(256))  # of 256 bytes all are equally likely
