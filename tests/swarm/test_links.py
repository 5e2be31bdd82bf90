"""Links that shrink what they send: ids still count exactly once, and the model still learns."""

import signal

import pytest

from hetpeer.bootstrap.audit import audit
from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.replay import ReferenceRun, compare
from hetpeer.bootstrap.settings import LinkSettings
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def test_sparse_bundles_through_a_death(swarm: Swarm, reference: ReferenceRun) -> None:
    """A fifth of each activation travels, in bytes; one of two pipelines' volunteers dies with an update in its memory."""
    links = LinkSettings(codec="topk-int8", ratio=12.0, adaptive=False, feedback=True)
    swarm.run = resign(swarm.run, links=links)
    bootstrap = await swarm.bootstrap()
    volunteers = [
        swarm.volunteer(name, before="killed_after_step_4" if name == "c" else "") for name in "cabd"
    ]
    assert await volunteers[0].ended(90.0) == -signal.SIGKILL
    await swarm.gone(volunteers[0])
    await swarm.finished(bootstrap, *volunteers[1:])

    verdict = audit(swarm.run.path)
    assert verdict.ok, verdict.problems
    comparison = compare(swarm.run.path, reference)
    assert comparison.lossy
    assert comparison.ok
    assert 1e-6 < comparison.max_relative_loss_difference < 0.1
    losses = [commit["loss"] for _, commit in sorted(History.of(swarm.records()).commits.items())]
    assert losses[-1] < 0.97 * losses[0]
