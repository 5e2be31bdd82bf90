"""BatchNorm's running values after a step that leaves out microbatches."""

import pytest
import torch

from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.worker.holding.running_statistics import RunningStatistics
from tests.stages.test_graph_hostile import good

MICROBATCHES = 5


@pytest.mark.parametrize("skipped", [(), (2,), (0, 4), (0, 1, 2, 3)])
def test_a_skipped_microbatch_counts_as_if_it_had_shown_the_running_values(skipped: tuple[int, ...]) -> None:
    """All others show 3 for both values: 3 stays, and everything else moves towards it."""
    spec = unpack_block(good())
    running = RunningStatistics(spec)
    (call,) = running._norms
    held = torch.tensor([3.0] * 8 + [7.0] * 8)
    added = torch.zeros(16)
    for microbatch in set(range(MICROBATCHES)) - {*skipped}:
        here = Pass(Draw(seed=0, step=0, microbatch=microbatch, microbatches=MICROBATCHES))
        here.statistics[call] = torch.full((8,), 3.0), torch.full((8,), 3.0)
        added += torch.cat(list(running.weighted(here).values()))
    running.update(held, added, MICROBATCHES, skipped)
    torch.testing.assert_close(held[:8], torch.full((8,), 3.0))
    assert (held[8:] > 3.0).all()
    assert (held[8:] < 7.0).all()
