"""Any module, cut anywhere: random graphs of layers, skips, shared parameters and stopped gradients equal
the eager module.
"""

import torch
from hypothesis import HealthCheck, event, given
from hypothesis import strategies as st
from torch import nn

from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.amounts import examples
from tests.stages.split_run import assert_same_step, eager_step, split_step

WIDTH, LAYERS = 6, 4
TOLERANCE = 1e-5
INPUTS = ("x", "z")

place = st.integers(0, 100)
"""Which of the values so far, and which of the layers: taken modulo their number."""
steps = st.one_of(
    st.tuples(st.sampled_from(["linear", "norm", "without gradient"]), place, place),
    st.tuples(st.sampled_from(["add", "gate", "join"]), place, place),
    st.tuples(st.sampled_from(["tanh", "detach", "drop", "halves"]), place, st.just(0)),
)


class Drawn(nn.Module):
    """Runs a list of (what, value, other) on a growing list of values, float32 [batch, WIDTH]; uses all of
    them.

    All: torch.export drops a dropout whose result nobody uses, while eager code draws its mask
    (docs/graph.md).
    """

    def __init__(self, program):
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.joining = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x, z, y):
        values = [x, z]
        for what, at, other in self.program:
            value = values[at % len(values)]
            values.append(self.step(what, value, other, values))
        return ((self.head(sum(values)) - y) ** 2).mean()

    def step(self, what, value, other, values):
        match what:
            case "linear":
                return torch.tanh(self.layers[other % LAYERS](value))
            case "norm":
                return self.norms[other % 2](value)
            case "without gradient":
                with torch.no_grad():
                    return torch.sigmoid(self.layers[other % LAYERS](value))
            case "add":
                return (value + values[other % len(values)]) * 0.5
            case "gate":
                return value * torch.sigmoid(values[other % len(values)])
            case "join":
                return torch.tanh(self.joining(torch.cat([value, values[other % len(values)]], dim=1)))
            case "tanh":
                return torch.tanh(value)
            case "detach":
                return value.detach()
            case "drop":
                return self.drop(value)
            case "halves":
                left, right = value.chunk(2, dim=1)
                return torch.cat([right, left * 0.5], dim=1)


def microbatch(samples):
    return {name: torch.randn(samples, WIDTH) for name in (*INPUTS, "y")}


@st.composite
def cuts(draw, blocks):
    """Stages of so many blocks: ranges [begin, end) without gaps."""
    borders = sorted(draw(st.sets(st.integers(1, blocks - 1), max_size=4))) if blocks > 1 else []
    return list(zip([0, *borders], [*borders, blocks], strict=True))


@examples(12, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(program=st.lists(steps, min_size=2, max_size=9), data=st.data())
def test_any_module_in_any_stages_is_the_eager_module(program, data):
    torch.set_num_threads(1)
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    model, microbatches = Drawn(program), [microbatch(samples) for samples in (4, 3)]
    dag = trace(model, microbatches[0])
    eager = eager_step(model, microbatches)
    for _ in range(3):
        target = data.draw(st.none() | st.integers(1, 14), "blocks")
        mode = ComputeMode(recompute=data.draw(st.booleans(), "recompute"))
        blocks = cut_blocks(dag, target, mode)
        ranges = data.draw(cuts(len(blocks)), "stages")
        event(f"{len(ranges)} stages")
        assert_same_step(split_step(blocks, ranges, dag.tensors, microbatches), eager, TOLERANCE)
