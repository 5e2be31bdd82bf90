"""Steps overlap (docs/asynchronous.md): real processes compute with parameters that are one or two updates
old, and one machine that does so gets the same.
"""

import asyncio
import itertools
import signal
from collections import Counter
from typing import Any

import pytest

from hetpeer.averaging.optim.adam import NAdam
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.log.evidence import Evidence
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.run.settings import LinkSettings
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
SPARSE = LinkSettings(codec="topk-int8", ratio=12.0, adaptive=False)
ROUNDED = LinkSettings(codec="int4", adaptive=False)


def staleness_of(swarm: Swarm) -> list[int]:
    """Of each step of the surviving history."""
    commits = History.of(swarm.records()).commits
    return [commits[step].get("behind", 0) for step in sorted(commits)]


def _every_contribution_is_told(swarm: Swarm, killed: str, staleness: int) -> None:
    """Each id of each step is used once, as its holders have signed; what `killed` had or was to do is
    lost, and among them.
    """
    verdict = audit(swarm.run.path, contributions=True)
    each, training = verdict.contributions or [], swarm.run.manifest.training
    used = Counter((one.step, one.id) for one in each if one.state == "used")
    assert used == Counter(itertools.product(range(training.steps), range(training.microbatches)))
    assert verdict.contributed.signed == len(used)
    assert verdict.contributed.waiting == verdict.contributed.silent == 0
    assert all(one.staleness == one.step - one.base <= staleness for one in each)
    early = training.head_start or training.microbatches
    if training.last_staleness is not None:
        _the_last_stage_is_newer(swarm, staleness)
    assert all(one.staleness == 0 for one in each if one.id >= early)
    assert any(one.staleness == staleness for one in each if one.id < early)
    lost = [one for one in each if one.state == "lost"]
    assert any(killed in one.peers for one in lost) or swarm.records("rollback")
    assert {(one.step, one.id) for one in each} == used.keys()


def _the_last_stage_is_newer(swarm: Swarm, staleness: int) -> None:
    """By the volunteers' own logs."""
    manifest = swarm.run.manifest
    lives = Evidence.read(swarm.run.volunteers, swarm.run.run_id).lives
    told = [event for events in lives.values() for event in events]
    age = {
        block: max(event.step - event.base for event in told if event.block == block)
        for block in range(len(manifest.blocks))
    }
    expected = {
        block: most
        for (begin, end), (_, most) in zip(manifest.layouts[0], manifest.delays.stages, strict=True)
        for block in range(begin, end)
    }
    assert age == expected
    assert expected[0] == staleness > expected[max(expected)]


@pytest.mark.parametrize(
    ("staleness", "changes"),
    [
        pytest.param(2, {"optimizer": NAdam(name="NAdam"), "compensation": 0.5}, marks=pytest.mark.proof),
        pytest.param(1, {"head_start": 2, "fresh_steps": 10}, marks=pytest.mark.proof),
        (1, {"head_start": 2, "fresh_steps": 4, "steps": 24}),
        pytest.param(2, {"last_staleness": 1, "fresh_steps": 4}, marks=pytest.mark.proof),
        (1, {"last_staleness": 0, "fresh_steps": 4, "steps": 24}),
        (1, {"last_staleness": 0, "fresh_steps": 4, "steps": 24, "links": SPARSE}),
        pytest.param(2, {"last_staleness": 1, "fresh_steps": 4, "links": ROUNDED}, marks=pytest.mark.proof),
    ],
    ids=[
        "corrected",
        "head start",
        "a short one",
        "by stage",
        "by stage, a short one",
        "by stage, over sparse links",
        "by stage, over rounding links",
    ],
)
async def test_steps_that_overlap_are_those_of_one_machine(
    swarm: Swarm, staleness: int, changes: dict[str, Any]
) -> None:
    """Three volunteers on two stages, with what is made of stale gradients, or few of them; one is killed
    in the middle and comes back.
    """
    links = changes.get("links", LinkSettings())
    changes = {"steps": 60} | changes | {"staleness": staleness}
    training = swarm.run.manifest.training.model_copy(
        update={name: value for name, value in changes.items() if name != "links"}
    )
    swarm.run = resign(swarm.run, training=training, links=links)
    bootstrap = await swarm.bootstrap(together=3)
    others = [swarm.volunteer(name) for name in ("one", "two")]
    killed = swarm.volunteer("killed", fail="run_backward:30")  # with a step's work on its hands
    await killed.ended()
    assert (await asyncio.to_thread(audit, swarm.run.path)).ok, "so far, while the run goes on"
    back = swarm.volunteer("back", home=killed.home)
    await swarm.finished(bootstrap, *others, within_s=200.0)
    if back.status is None:  # it came when all was over
        back.signal(signal.SIGINT)
    await back.ended()
    replayed = await asyncio.to_thread(replay, swarm.run.path)
    assert replayed.ok, replayed.problems
    assert (replayed.equal, replayed.shown) == (replayed.steps, 0), replayed.why
    found = staleness_of(swarm)
    assert max(found) == staleness, "steps overlapped as far as they may"
    assert sum(map(bool, found)) > len(found) // 2, "and most did"
    assert not any(found[: swarm.run.manifest.training.fresh_steps])
    _every_contribution_is_told(swarm, killed.peer_id, staleness)
    assert swarm.judged().staleness == {behind: found.count(behind) for behind in sorted(set(found))}
