"""A run from end to end in which nobody can load a pickle."""

import pytest

from hetpeer.bootstrap.replay import ReferenceRun
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def test_nobody_needs_pickle(swarm: Swarm, reference: ReferenceRun) -> None:
    """`pickle.load`, `pickle.loads`, `Unpickler` and `torch.load` raise in every process, also in workers."""
    bootstrap = await swarm.bootstrap(before="without_pickle")
    volunteers = [swarm.volunteer(name, before="without_pickle") for name in "abc"]
    await volunteers[0].says("you are contributing")
    await volunteers[0].kill()
    volunteers[0] = swarm.volunteer("d", before="without_pickle")
    await swarm.finished(bootstrap, *volunteers)
    swarm.exact(reference)
