"""Which elements of a block's vector are of which parameter group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetpeer.stages.block.parameter_groups import group_ranges
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace


class Net(nn.Module):
    """Four parameters: 6, 2, 4 and 2 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def test_the_first_pattern_that_matches_decides() -> None:
    (spec,) = cut_blocks(trace(Net(), {"x": torch.randn(4, 3)}), 1)
    assert [*spec.parameter_specs] == ["first.weight", "first.bias", "second.weight", "second.bias"]
    whole = ((0, 14),)
    assert group_ranges(spec, ["*.bias"], whole) == (((6, 8), (12, 14)), ((0, 6), (8, 12)))
    assert group_ranges(spec, ["first.*", "*"], whole) == (((0, 8),), ((8, 14),), ())
    assert group_ranges(spec, ["*.bias"], ((0, 7), (13, 14))) == (((6, 7), (13, 14)), ((0, 6),))
    assert group_ranges(spec, [], whole) == ()
