"""A graph that is too large is refused with its size, and with the line of the loop that makes it."""

import pytest
import torch
from torch import fx, nn

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.graph.structure_check import GraphLimits
from hetpeer.stages.tracing import graph_size
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.graph_size import check_block_sizes
from hetpeer.stages.tracing.trace import trace

pytestmark = pytest.mark.xdist_group("models")


class Loop(nn.Module):
    """A recurrence that is not linear, by a loop in Python."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(state * self.weight) + x[:, step]
        return state.square().mean()


def test_a_loop_without_end_is_named_while_it_is_traced(monkeypatch):
    monkeypatch.setattr(graph_size, "MOST_CALLS", 60)
    create = fx.Graph.create_node
    trace(Loop(), {"x": torch.randn(4, 10, 4)})
    with pytest.raises(LocalError, match="HP-MODEL-016") as caught:
        trace(Loop(), {"x": torch.randn(4, 200, 4)})
    assert "60 operator calls" in caught.value.what
    assert f"{__file__}:27" in caught.value.why
    assert fx.Graph.create_node is create


@pytest.mark.parametrize("limits", [GraphLimits(items=20), GraphLimits(packed_bytes=2000)])
def test_a_block_that_volunteers_would_refuse_is_refused_at_init(limits):
    specs = cut_blocks(trace(Loop(), {"x": torch.randn(4, 10, 4)}), 1)
    check_block_sizes(specs)
    with pytest.raises(LocalError, match="HP-MODEL-016") as caught:
        check_block_sizes(specs, limits)
    assert f"{len(specs[0].nodes)} operator calls" in caught.value.what
