"""The only holder of some blocks leaves in good order: what it alone holds is stored before it goes."""

import signal

import pytest

from hetpeer.bootstrap.consensus.replica import credit_in
from hetpeer.dht.base.errors import ExitCode
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest
from tests.swarm.child import until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.mark.parametrize("how", ["SIGINT", "finish"])
async def test_no_committed_step_is_lost(swarm: Swarm, how: str) -> None:
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 50_000})
    swarm.run = resign(swarm.run, training=training)
    await swarm.bootstrap("--keep-places")
    volunteers = [swarm.volunteer("stays"), swarm.volunteer("leaves")]
    await until(lambda: swarm.version >= 3, "some steps are committed")
    leaves = volunteers[1]
    told = credit_in(swarm.run.manifest, swarm.records()).of
    if how == "SIGINT":
        leaves.signal(signal.SIGINT)
    else:
        ask(leaves.home, ControlRequest(do="finish"))
    assert await leaves.ended() == ExitCode.OK
    assert (await swarm.gone(leaves))["why"] == "said farewell"
    assert "the run goes back to its last checkpoint" not in leaves.said

    records = swarm.records()
    committed = max(record["step"] for record in records if record["kind"] == "commit") + 1
    assert [r["version"] for r in records if r["kind"] == "checkpoint"][-1] == committed
    assert all(r["to_version"] == committed for r in records if r["kind"] == "rollback")
    kept = credit_in(swarm.run.manifest, records).of
    assert all(kept[peer] >= credit for peer, credit in told.items())
    assert kept[leaves.peer_id] > 0

    back = swarm.volunteer("comes later")
    await until(lambda: swarm.version > committed, "the run goes on from there")
    for volunteer in (volunteers[0], back):
        volunteer.signal(signal.SIGINT)
        assert await volunteer.ended() == ExitCode.OK
