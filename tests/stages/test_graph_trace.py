"""What the tracer keeps, and what it refuses and how."""

import json

import pytest
import torch
from torch import nn

from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.stages.graph.safety_check import check_at
from hetpeer.stages.graph.structure_check import DEFAULT_LIMITS
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.refusals import line_of
from hetpeer.stages.tracing.trace import trace
from tests.stages.models import gpt, small

pytestmark = pytest.mark.xdist_group("models")


class Function(nn.Module):
    """A model whose forward is given."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def test_gpt_graph_holds_all_parameters_in_the_model_order():
    model, dag, _ = gpt("default")
    assert list(dag.parameters.values()) == [name for name, _ in model.named_parameters()]
    assert dag.inputs == ("tokens", "targets")
    assert not dag.buffers
    for name, parameter in model.named_parameters():
        assert dag.tensors[name].data_ptr() == parameter.data_ptr()


def test_gpt_flops_are_those_of_the_formula():
    """2 FLOPs per weight and token of the matrices, 4 T D per token and layer for attention; then the
    small change.
    """
    _, dag, data = gpt("default")
    tokens, width, layers, context, vocabulary = data["tokens"].numel(), 128, 4, 64, 256
    matrices = 12 * width**2 * layers + width * vocabulary
    products = tokens * (2 * matrices + 4 * context * width * layers)
    assert products < sum(dag.flops.values()) < 1.01 * products


def test_meta_model_is_traced_without_weights():
    from hetpeer.examples.gpt import build

    data = {name: torch.zeros(1, 64, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}
    with torch.device("meta"):
        dag = trace(build(layers=1), data)
    assert dag.tensors["h.0.mlp.c_fc.weight"].is_meta


def test_no_grad_region_stops_gradients():
    _, dag, _ = small("no_grad")
    assert set(dag.parameters.values()) == {"a.weight", "a.bias", "c.weight", "c.bias"}
    assert {"b.weight", "b.bias"} <= set(dag.buffers.values())


def test_frozen_parameters_are_buffers():
    _, dag, _ = small("frozen")
    assert set(dag.buffers.values()) == {"layers.2.weight", "layers.2.bias", "scale"}


def test_nodes_the_loss_does_not_need_are_dropped():
    def forward(self, x):
        self.linear(x).exp()
        return self.linear(x).mean()

    assert [node.op for node in trace(Function(forward), {"x": torch.randn(2, 8)}).nodes] == [
        "aten.linear.default",
        "aten.mean.default",
    ]


def autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.linear(x).float().mean()


def autocast_inside_no_grad(self, x):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = self.linear(x)
    return self.linear(y.float()).mean()


def branch(self, x):
    if self.linear(x).sum() > 0:
        return self.linear(x).mean()
    return self.linear(x).sum()


def counting(self, x):
    self.norm.running_var.add_(1)
    return self.linear(x).mean()


def draws_for_nothing_without_gradient(self, x):
    """Which of the two is left, and so its number, is not known after the trace."""
    with torch.no_grad():
        nn.functional.dropout(x, 0.5).exp()
        y = nn.functional.dropout(x, 0.5)
    return nn.functional.dropout(self.linear(x), 0.5).mean() + y.mean()


def test_a_dropout_that_draws_nothing_may_be_for_nothing():
    def forward(self, x):
        nn.functional.dropout(x, 0.5, training=False).exp()
        nn.functional.dropout(x, 0.0).exp()
        return nn.functional.dropout(self.linear(x), 0.5).mean()

    assert "hetpeer.dropout" in {node.op for node in trace(Function(forward), {"x": torch.randn(2, 8)}).nodes}


@pytest.mark.parametrize(
    ("forward", "code", "part"),
    [
        (lambda self, x: self.linear(x * torch.bernoulli(x.sigmoid())).mean(), "HP-MODEL-001", "nn.Dropout"),
        (lambda self, x: torch.linalg.svdvals(self.linear(x)).sum(), "HP-MODEL-001", "svd"),
        (lambda self, x: self.linear(x * torch.randperm(8)).mean(), "HP-MODEL-001", "randperm"),
        (lambda self, x: self.linear(x).mean() * x.sum().item(), "HP-MODEL-001", "item"),
        (lambda self, x: self.linear(x)[x > 0].mean(), "HP-MODEL-001", "no shape and no number"),
        pytest.param(
            lambda self, x: self.linear(x).expand(1025, 4, 8).unbind()[0].mean(),
            "HP-MODEL-001",
            "1024 parts",
            marks=pytest.mark.proof,
        ),
        (autocast, "HP-MODEL-001", "autocast"),
        (autocast_inside_no_grad, "HP-MODEL-001", "autocast"),
        (branch, "HP-MODEL-002", "if self.linear(x).sum() > 0"),
        (lambda self, x: self.nothing(x), "HP-MODEL-002", "nothing"),
        (lambda self, x: self.norm(self.norm(self.linear(x))).mean(), "HP-MODEL-001", "once per forward"),
        (counting, "HP-MODEL-003", "'norm.running_var'"),
        (
            lambda self, x: self.linear(x).repeat(x.shape[0] + 1, 1).mean(),
            "HP-MODEL-003",
            "multiple of the batch",
        ),
        (lambda self, x: self.linear(x), "HP-MODEL-003", "scalar"),
        (lambda self, x: (self.linear(x).mean(), x), "HP-MODEL-003", "2 values"),
        (lambda self, x: x.mean(), "HP-MODEL-003", "no trainable parameter"),
        (draws_for_nothing_without_gradient, "HP-MODEL-003", "a random draw of the model"),
    ],
)
def test_refusals_name_what_is_wrong(forward, code, part):
    with pytest.raises(LocalError) as caught:
        trace(Function(forward), {"x": torch.randn(4, 8)})
    assert caught.value.code == code
    assert caught.value.exit_code is ExitCode.CONFIG
    assert part in caught.value.line()
    assert caught.value.fix


def test_parameters_in_half_precision_are_refused():
    model = Function(lambda self, x: self.linear(x).float().mean()).bfloat16()
    with pytest.raises(LocalError, match="bfloat16"):
        trace(model, {"x": torch.randn(4, 8, dtype=torch.bfloat16)})


def test_a_batch_norm_over_one_sample_is_refused():
    with pytest.raises(LocalError, match="HP-MODEL-003") as caught:
        trace(Function(lambda self, x: self.norm(self.linear(x)).mean()), {"x": torch.randn(1, 8)})
    assert "one value for each channel of a microbatch of 1" in caught.value.what
    assert "--microbatch-size" in caught.value.fix


def test_a_block_says_that_a_last_microbatch_of_one_sample_has_no_variance():
    dag = trace(Function(lambda self, x: self.norm(self.linear(x)).mean()), {"x": torch.randn(4, 8)})
    (block,) = cut_blocks(dag, 1)
    with pytest.raises(ProtocolError) as caught:
        check_at(block, 1, DEFAULT_LIMITS)
    assert "one value for each channel" in caught.value.detail


def test_a_line_of_a_library_comes_with_the_authors_line_that_called_it():
    own, library, ours = ("/home/me/model.py", 3), (json.__file__, 7), (torch.__file__, 9)
    assert line_of([own, ours]) == "/home/me/model.py:3"
    assert line_of([own, library, ours]) == "json/__init__.py:7, called at /home/me/model.py:3"
    assert line_of([library, own]) == "/home/me/model.py:3"
    assert line_of([library]) == "json/__init__.py:7"
    assert line_of([ours]) == ""
