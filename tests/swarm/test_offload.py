"""A volunteer whose optimizer lies in the scratch file, beside one that has all in memory: equal bits."""

import pytest

from tests.swarm.dying_worker import BLOCKS, lose_a_worker
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
MOMENTS, STEPS = 2, 5


@pytest.mark.parametrize(("place", "each_step"), [("apply", BLOCKS), ("scratch_write", BLOCKS * MOMENTS)])
async def test_a_worker_killed_in_an_update_on_the_disk_loses_nothing(
    swarm: Swarm, place: str, each_step: int
) -> None:
    """It dies before an update, or while a moment is on its way to the disk. Its state is fetched again."""
    at = f"worker_{place}:{STEPS * each_step + 1}"
    plain, filed = await lose_a_worker(swarm, "filed", "--offload", "disk", at=at)
    assert "offload disk" in filed.said
    assert "offload none" in plain.said
    swarm.exact_so_far()
