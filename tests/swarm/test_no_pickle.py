"""A run from end to end in which nobody can load a pickle."""

import pytest

from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.mark.proof
async def test_nobody_needs_pickle(swarm: Swarm) -> None:
    """`pickle.load`, `pickle.loads`, `Unpickler` and `torch.load` raise in every process, also in workers."""
    one, volunteers = await swarm.without_end("without_pickle", serves="without_pickle")
    await one.kill()
    volunteers.remove(one)
    newcomer = swarm.volunteer("d", before="without_pickle")
    await newcomer.says("you are contributing", 100.0)
    await swarm.left_in_order([*volunteers, newcomer])
    swarm.exact_so_far()
