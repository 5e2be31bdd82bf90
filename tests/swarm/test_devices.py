"""A volunteer with two devices, beside one with one device: equal bits."""

import pytest

from tests.swarm.dying_worker import lose_a_worker
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
BACKWARDS = 20
"""After so many one of the two workers dies: in the fourth step or so."""


async def test_one_of_two_workers_killed_in_a_backward_loses_nothing(swarm: Swarm) -> None:
    """Its volunteer ends the other one too, and comes back with both."""
    at = f"worker_backward:{BACKWARDS}"
    _, divided = await lose_a_worker(swarm, "divided", "--device", "cpu,cpu", at=at)
    assert divided.said.count("on 2 devices") == 2
    assert "computes on 1 processor core + 1 processor core" in divided.said
    swarm.exact_so_far()
