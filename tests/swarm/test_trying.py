"""Joining for a limited time, and finding out what would come of it without joining."""

import signal
import time

import pytest

from hetpeer.dht.base.errors import ExitCode
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest
from tests.swarm.swarm import Swarm
from tests.swarm.test_bad_input import fails
from tests.swarm.test_joining import to_be_held_by_one

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


async def test_it_leaves_by_itself_when_its_time_is_over(swarm: Swarm) -> None:
    """In good order: the step under way is committed, and it is thanked."""
    to_be_held_by_one(swarm)
    bootstrap = await swarm.bootstrap()
    volunteer = swarm.volunteer("volunteer", "--for", "30m", before="an_hour_passes")
    await swarm.stored(3)
    standing = ask(volunteer.home, ControlRequest(do="status"))
    assert standing.ends is not None
    assert 0 < standing.ends - standing.since <= 1800.0
    (volunteer.home / "late").touch()
    assert await volunteer.ended() == ExitCode.OK, volunteer.said
    said = volunteer.said.splitlines()
    assert said.index("its time (--for) is over: it leaves when the current step is done") < len(said) - 2
    assert said[-2].startswith("thank you: ")
    assert said[-1] == "left the run"
    bootstrap.signal(signal.SIGINT)
    assert await bootstrap.ended() == ExitCode.OK
    assert swarm.judged().steps >= 3


@pytest.mark.proof
async def test_what_would_come_of_joining(swarm: Swarm) -> None:
    """Nobody of the run hears of it, and nothing but the key stays. Whatever ends `join` ends it as well."""
    to_be_held_by_one(swarm)
    bootstrap = await swarm.bootstrap()
    hour = (time.localtime().tm_hour + 12) % 24
    other = f"{hour:02}:00-{hour:02}:01"
    trying = swarm.volunteer("trying", "--dry-run", "--when", "schedule", "--hours", other)
    small = swarm.volunteer("small", "--dry-run", before=f"room_for_a_model:{1 << 20}")
    full = swarm.volunteer("full", "--dry-run", "--files-limit", "1KiB")
    assert await trying.ended() == ExitCode.OK, trying.said
    assert f"run {swarm.run.manifest.name} ({swarm.run.run_id}): its manifest is valid" in trying.said
    last = len(swarm.run.manifest.blocks) - 1
    assert f"it would probably take blocks 0-{last}, held by no volunteers now, with " in trying.said
    assert "it would download " in trying.said
    assert f"at the moment it would be paused (schedule): it is outside {other}" in trying.said
    assert trying.said.endswith("this was a trial, and no place was asked for\n")
    await fails(small, ExitCode.TOO_SMALL, "HP-FIT-001", "--ram-limit")
    await fails(full, ExitCode.TOO_SMALL, "HP-DISK-005", "limits.files")
    for child in (trying, small, full):
        left = {path.name for path in child.home.iterdir()}
        assert left - {"transfer.json"} == {"identity.key", "identity.key.lock"}

    volunteer = swarm.volunteer("volunteer")
    await swarm.committed(1)
    twin = swarm.volunteer("twin", "--dry-run", home=volunteer.home)
    beside = swarm.volunteer("beside", "--dry-run")
    nobody = swarm.volunteer("nobody", "--dry-run", via=NOBODY, before="gives_up_soon")
    await fails(twin, ExitCode.IDENTITY, "HP-ID-002", f"pid {volunteer.pid}")
    await fails(nobody, ExitCode.NETWORK, "HP-NET-002")
    assert await beside.ended() == ExitCode.OK, beside.said
    assert "this was a trial" in beside.said
    await swarm.stored(1)
    volunteer.signal(signal.SIGINT)
    assert await volunteer.ended() == ExitCode.OK
    back = swarm.start("back", "join", "--dry-run", "--host", "127.0.0.1", home=volunteer.home)
    assert await back.ended() == ExitCode.OK, back.said
    assert f"run {swarm.run.manifest.name} ({swarm.run.run_id}): its manifest is valid" in back.said
    bootstrap.signal(signal.SIGINT)
    assert await bootstrap.ended() == ExitCode.OK, bootstrap.said
    assert {path.stem for path in swarm.run.volunteers.iterdir()} == {volunteer.peer_id}
