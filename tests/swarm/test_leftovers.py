"""Work that nobody holds any more finds a new holder through the DHT, in the middle of its step."""

import signal
from typing import Any

import pytest

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.log.volunteer_log import read_event, read_events
from hetpeer.dht.identity.peer_identity import Identity
from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

IDS = set(range(6))
MANY = 160
"""Microbatches; the bundles of so many take more than `tampering.LITTLE`."""
BORDER = 3
NEWCOMER = (
    "fetch_state:1",
    "tell_ready:1",
    "ask_leftovers:1",
    "run_forward:2",
    "run_backward:3",
    "tell_sealed:1",
    "send_part:1",
    "tell_vote:1",
)


async def orphaned(swarm: Swarm, after: int = 3, before: str = "") -> Child:
    """The first stage in its first step (`before` as in `Swarm.start`); the second stage has died with its
    gradient number `after`, and its state can be had.
    """
    holder = swarm.volunteer("holder", fail=f"send_gradient:{after}")
    assert (await holder.blocks())[0] == BORDER
    sender = swarm.volunteer("sender", before=before)
    await holder.ended(120.0)
    await swarm.gone(holder)
    return sender


def events(swarm: Swarm, child: Child, kind: str) -> list[dict[str, Any]]:
    """What `child` says of the first step."""
    path = swarm.run.volunteers / f"{child.peer_id}.jsonl"
    said = [read_event(line)[1] for _, line in read_events(path)]
    return [event for event in said if (event["kind"], event["step"]) == (kind, 0)]


async def test_a_leftover_reaches_a_holder_that_its_sender_never_knew(swarm: Swarm) -> None:
    bootstrap = await swarm.bootstrap("--keep-places")
    sender = await orphaned(swarm)
    look = swarm.start("look", "status", "--watch", "--json", "--bootstrap", swarm.address)
    (left,) = await until(
        lambda: look.shown.get("leftovers", ()), lambda: f"it is on the board: {look.said}", 60.0
    )
    look.signal(signal.SIGTERM)
    assert (left["sender"], left["block"], left["step"]) == (sender.peer_id, BORDER, 0)
    assert left["microbatches"] > 0

    newcomer = swarm.volunteer("newcomer")
    await swarm.finished(bootstrap, sender, newcomer)
    assert f"{newcomer.peer_id[-6:]} came into step 0" in sender.said
    assert not swarm.records("rollback")
    found = {i for event in events(swarm, newcomer, "leftover") for i in event["ids"]} & IDS
    covers = [
        dict(event["cover"]) for event in events(swarm, newcomer, "applied") if event["block"] >= BORDER
    ]
    assert [set(cover[newcomer.peer_id]) for cover in covers] == [IDS] * len(covers)
    assert covers
    assert audit(swarm.run.path).leftovers == len(found) > 0
    swarm.exact()


@pytest.mark.proof
async def test_the_reliable_peer_completes_what_nobody_else_does(swarm: Swarm) -> None:
    """Of more microbatches than the sender's memory holds: most of them waited on its disk."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 1, "batch_size": 2 * MANY})
    swarm.run = resign(swarm.run, training=training)
    bootstrap = await swarm.bootstrap("--stand-in", "--keep-places", before="hasty_stand_in")
    sender = await orphaned(swarm, MANY - 10, before="little_memory")
    assert "go to the disk" in sender.said
    await swarm.finished(
        bootstrap, sender, within_s=150.0
    )  # the stand-in is no fork: it imports everything, and has most to do
    helper = Identity.load(swarm.run.path / "stand-in" / "identity.key").peer_id
    assert (swarm.run.volunteers / f"{helper}.jsonl").exists()
    assert not swarm.records("rollback")
    assert audit(swarm.run.path).leftovers > MANY // 2
    swarm.exact()


@pytest.mark.proof
async def test_all_that_is_kept_may_wait_on_the_disk(swarm: Swarm) -> None:
    """Of both stages: the limit of memory is kept at the cost of the disk, and nothing waits for room."""
    bootstrap = await swarm.bootstrap()
    both = [swarm.volunteer(name, before="no_room_for_kept") for name in ("one", "other")]
    await swarm.finished(bootstrap, *both)
    assert all("go to the disk" in child.said for child in both)
    assert not swarm.records("rollback")
    swarm.exact()


@pytest.mark.grid
@pytest.mark.parametrize("cell", NEWCOMER)
async def test_a_newcomer_dies_as_well(swarm: Swarm, cell: str) -> None:
    bootstrap = await swarm.bootstrap()
    sender = await orphaned(swarm)
    newcomer = swarm.volunteer("newcomer", fail=cell)
    assert await newcomer.ended() == -signal.SIGKILL, newcomer.said
    last = swarm.volunteer("last")
    await swarm.finished(bootstrap, sender, last)
    swarm.exact()
