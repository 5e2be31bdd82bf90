"""A plan that was given: real volunteers join under their names and have their places in it."""

import json

import pytest

from hetpeer.bootstrap.log.history import History
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


def plan_file(swarm: Swarm, *pipelines: list[tuple[str, int, int]]) -> str:
    """A plan of (device, begin, end), pipeline by pipeline."""
    rows = [[{"device": d, "blocks": [b, e]} for d, b, e in row] for row in pipelines]
    path = swarm.folder / "plan.json"
    path.write_text(json.dumps({"schema": "hetpeer.plan/1", "pipelines": rows}))
    return str(path)


async def test_one_that_is_not_in_the_plan_is_a_backup(swarm: Swarm) -> None:
    """It comes while the others work, keeps a place and fetches behind them; nothing waits for it."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 10})
    swarm.run = resign(swarm.run, training=training)
    given = plan_file(swarm, [("attic", 0, 5), ("shed", 5, 6)])
    await swarm.bootstrap("--plan", given, together=2)
    planned = [swarm.volunteer("attic"), swarm.volunteer("shed")]
    for one in planned:
        await one.says("you are contributing")
    guest = swarm.volunteer("guest")
    await guest.says("backup for block")
    (backups,) = swarm.records("backups")
    assert len(backups["peers"]) == 1
    await swarm.committed(swarm.version + 2)
    assert len(History.of(swarm.records()).contributors) == 2
    await swarm.left_in_order([guest, *planned])  # else the run goes on while it is judged
    swarm.exact_so_far()


async def test_named_volunteers_are_seated_as_planned_though_one_is_absent(swarm: Swarm) -> None:
    """The cuts are none that the run itself would have made; the second pipeline's `barn` never comes."""
    given = plan_file(swarm, [("attic", 0, 5), ("shed", 5, 6)], [("barn", 0, 6)])
    bootstrap = await swarm.bootstrap("--plan", given, together=2)
    shed = swarm.volunteer("shed")
    await shed.says("getting block 5 ready")
    attic = swarm.volunteer("attic")
    await attic.says("getting blocks 0-4 ready")
    await swarm.finished(bootstrap, attic, shed)
    (planned,) = swarm.records("planned")
    assert planned["layouts"] == [[[0, 5], [5, 6]], [[0, 6]]]
    assert f"plan {planned['id']} is in force, with 3 places" in bootstrap.said
    assert not swarm.records("arranged")
    swarm.exact()
