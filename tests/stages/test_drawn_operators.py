"""Random numbers besides dropout's: the same in eager code and in the blocks, wherever they are cut."""

import pytest
import torch
from torch import nn

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.block import run_range
from hetpeer.stages.graph.block_spec import OperatorCall
from hetpeer.stages.graph.interpreter import Program
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.stages.split_run import CPU, assert_same_step, draw, eager_step, received, split_step


class Drawing(nn.Module):
    """Drop path as transformers and timm write it, noise of three kinds, dropouts that lead nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            nn.functional.dropout(x, 0.3)
            kept = 0.75 + torch.rand((x.shape[0], 1), dtype=x.dtype)
            kept.floor_()
            y = layer(nn.functional.dropout(x, 0.2)).div(0.75) * kept
            with torch.no_grad():
                nn.functional.dropout(x, 0.1)
            x = x + y * x.new_empty((x.shape[0], 1)).bernoulli_(0.5).div_(0.5)
        noise = torch.rand_like(x) + torch.randn_like(x) + torch.empty_like(x).exponential_()
        return (x * noise).square().mean()


@pytest.fixture(scope="module")
def traced():
    torch.manual_seed(3)
    model, batches = Drawing(), [{"x": torch.randn(samples, 8)} for samples in (4, 3)]
    return model, trace(model, batches[0]), batches


@pytest.mark.parametrize("count", [1, 3])
def test_draws_are_the_runs_own(traced, count):
    model, dag, batches = traced
    ranges = [(i, i + 1) for i in range(count)]
    split = split_step(cut_blocks(dag, count), ranges, dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches), 1e-5)


def test_an_evaluation_keeps_each_path_by_its_probability(traced):
    """Twice the same, and what a drop path drops in training is there."""
    _, dag, batches = traced
    (spec,) = cut_blocks(dag, 1)
    block, _ = received(spec, dag.tensors)
    losses = [float(*run_range([block], {}, batches[0], 4, Pass(None)).values()) for _ in range(2)]
    assert losses[0] == losses[1]
    for op, sizes in (("hetpeer.keep", (5, 1)), ("hetpeer.bernoulli", (5, 1))):
        call = OperatorCall(name="y", op=op, args=(sizes, 0.75, 2), kwargs={})
        program = Program([call], ("y",), CPU)
        assert program.run({}, Pass(None))["y"].tolist() == [[0.75]] * 5
        assert set(program.run({}, Pass(draw()))["y"].flatten().tolist()) <= {0.0, 1.0}


def test_numbers_have_their_distribution_and_no_two_draws_are_equal():
    def drawn(op: str, number: int) -> torch.Tensor:
        call = OperatorCall(name="y", op=op, args=((20_001,), number), kwargs={})
        return Program([call], ("y",), CPU).run({}, Pass(draw()))["y"]

    for op, mean, deviation in (("uniform", 0.5, 12**-0.5), ("normal", 0.0, 1.0), ("exponential", 1.0, 1.0)):
        numbers = drawn(f"hetpeer.{op}", 1)
        assert abs(numbers.mean() - mean) < 0.03
        assert abs(numbers.std() - deviation) < 0.03
        assert numbers.isfinite().all()
        assert not numbers.equal(drawn(f"hetpeer.{op}", 2))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("hetpeer.uniform", ((4,), -1)),
        ("hetpeer.uniform", ((4,), 1 << 40)),
        ("hetpeer.keep", ((4,), 1.5, 0)),
        ("hetpeer.bernoulli", ((4,), -0.5, 0)),
    ],
)
def test_a_dry_run_refuses_what_a_real_one_would(op, args):
    program = Program([OperatorCall(name="y", op=op, args=args, kwargs={})], ("y",), torch.device("meta"))
    with pytest.raises(ProtocolError, match="a draw takes"):
        program.run({}, Pass(draw()))


class RecurrentThenDropout(nn.Module):
    """An LSTM without dropout of its own, and a dropout behind it."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(nn.functional.dropout(self.lstm(x)[0], 0.5, self.training)).square().mean()


def test_a_recurrent_layer_without_dropout_is_no_draw():
    torch.manual_seed(7)
    model, data = RecurrentThenDropout(), {"x": torch.randn(4, 5, 8)}
    dag = trace(model, data)
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]), 1e-5)
