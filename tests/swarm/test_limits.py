"""Limits of volunteers that train: changed while they do, and nothing is lost."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import limits
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest
from tests.swarm.child import until
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.mark.proof
async def test_what_takes_a_new_worker_takes_no_new_volunteer(swarm: Swarm) -> None:
    """Its network process stays, its worker goes, and the run is exact."""
    one, volunteers = await swarm.without_end(before="sleepy")
    await until(lambda: swarm.lives(one) == 1, "its first life")
    before = one.helpers()
    owner = swarm.start("owner", "config", "set", "limits.ram", "20%", home=one.home)
    assert await owner.ended() == ExitCode.OK, owner.said
    assert "limits.ram is 20% from now on" in owner.printed
    assert (one.home / "config.toml").read_text() == '[limits]\nram = "20%"\n'
    await one.says("paused (settings)")
    await one.says("resumed")
    await until(lambda: one.helpers().get("worker", before["worker"]) != before["worker"], "a new worker")
    assert one.helpers()["p2pd"] == before["p2pd"]
    wrong = ControlRequest(do="set", key="limits.up", value="fast")
    with pytest.raises(LocalError, match="HP-CONF-003"):
        ask(one.home, wrong)
    await until(lambda: swarm.lives(one) == 2, "its second life")
    await swarm.committed(swarm.version + 2)
    ask(one.home, ControlRequest(do="set", key="compute.device", value="cuda:99"))
    await one.says("no worker starts on compute.device 'cuda:99': back to 'auto'")
    await until(lambda: swarm.lives(one) == 3, "its third life")
    assert not swarm.records("rollback")
    await swarm.left_in_order(volunteers)
    assert (one.home / "transfer.json").exists()
    swarm.judged()


async def test_a_month_that_is_full(swarm: Swarm) -> None:
    """It is held before it works, counts over a restart, and goes on as soon as it may."""
    await swarm.bootstrap()
    swarm.volunteer("other")  # which waits for somebody
    capped = swarm.volunteer("capped", "--transfer-cap", "1kb")
    await capped.says("paused (transfer_cap)")
    counted = ask(capped.home, ControlRequest(do="status")).month_bytes
    assert counted is not None
    assert counted > 1000
    assert await swarm.start("owner", "stop", home=capped.home).ended() == ExitCode.OK
    assert await capped.ended() == ExitCode.OK, capped.said
    again = swarm.volunteer("capped", "--transfer-cap", "1kb")
    await again.says("paused (transfer_cap)")
    more = ask(again.home, ControlRequest(do="status")).month_bytes
    assert more is not None
    assert more > counted
    owner = swarm.start("owner", "config", "set", "limits.transfer_cap", "none", home=again.home)
    assert await owner.ended() == ExitCode.OK, owner.said
    await again.says("resumed")
    await again.says("you are contributing")


@pytest.mark.proof
@pytest.mark.alone
async def test_limits_hold(tmp_path: Path) -> None:
    """Ten times what the benchmark asks for: this machine may be busy."""
    options = SimpleNamespace(rounds=1, mbit=5, seconds=6.0, microbatches=40, seed=0)
    found = await limits.measure(options, tmp_path)
    assert abs(found["ratios"]["up"] - 1) <= 10 * limits.GOALS["up"], found
    assert found["ratios"]["cpu"] <= 1 + 10 * limits.GOALS["cpu"], found
    assert found["middle"]["pause_s"] <= 10 * limits.GOALS["pause_s"], found
    assert (found["problems"], found["rollbacks"]) == ([], 0)
