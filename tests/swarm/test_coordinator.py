"""The coordinator dies, runs out of disk, and comes back."""

import json

import pytest

from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def test_bootstrap_is_killed_and_finds_no_room(swarm: Swarm) -> None:
    """Both times the run goes on at the last commit; a newcomer gets ready through a volunteer meanwhile."""
    bootstrap = await swarm.bootstrap(before="patient")
    volunteers = one, _ = swarm.volunteer("one"), swarm.volunteer("other")
    await swarm.committed(4)
    await bootstrap.kill()

    watcher = swarm.start("watcher", "status", "--bootstrap", one.address(), "--json")
    assert await watcher.ended() == 0, watcher.said
    shown = json.loads(watcher.printed)
    assert {peer["peer"] for peer in shown["peers"]} >= {volunteer.peer_id for volunteer in volunteers}

    newcomer = swarm.volunteer("newcomer", via=one.address())
    await newcomer.says("no coordinator answers yet; block")
    assert list(newcomer.home.glob("runs/*/graph/*.graph"))

    workers = [volunteer.helpers()["worker"] for volunteer in volunteers]
    for worker in workers:
        worker.suspend()  # no step ends, and no holder gives its state, whichever place the newcomer gets
    full = await swarm.bootstrap(before="patient")
    await newcomer.says("waiting for the state of blocks")
    for worker in workers:
        worker.resume()
    await newcomer.says("you are contributing")
    full.fill_disk(swarm.run.log_path)
    await full.says("waits for room: HP-DISK-002: no room to write")
    full.free_disk()
    await full.says("there is room to write")
    await swarm.finished(full, *volunteers, newcomer)
    assert full.said.count("waits for room: HP-DISK-002") == 1
    assert full.said.count("HP-DISK-002") <= 2  # a checkpoint that was being saved has a line of its own
    assert [r["term"] for r in swarm.records("reign")] == [1, 2, 3]
    assert not swarm.records("rollback")
    swarm.exact()


@pytest.mark.proof
async def test_a_volunteer_comes_back_before_the_coordinator_does(swarm: Swarm) -> None:
    """It has been there before, so it waits for it."""
    bootstrap = await swarm.bootstrap()
    one, other = swarm.volunteer("one"), swarm.volunteer("other")
    await swarm.committed(4)
    await bootstrap.kill()
    await other.kill()
    peers = other.home / "peers.json"
    book = json.loads(peers.read_text())
    for known in book["runs"]:
        known["seen"] = []  # or it comes back through the other volunteer
    peers.write_text(json.dumps(book))
    back = swarm.volunteer("other")
    await back.says("this run has answered before")
    last = await swarm.bootstrap()
    await swarm.finished(last, one, back)
    swarm.exact()
