"""Work that nobody holds any more finds a new holder through the DHT, in the middle of its step."""

import json
import signal
from typing import Any

import pytest

from hetpeer.bootstrap.audit import audit
from hetpeer.bootstrap.eventlog import read_event, read_events
from hetpeer.bootstrap.replay import ReferenceRun
from hetpeer.dht.identity import Identity
from tests.swarm.swarm import Child, Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

IDS = set(range(6))
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


async def orphaned(swarm: Swarm, *options: str, **how: Any) -> tuple[Child, Child]:
    """The bootstrap node (with `options`), and the first stage in its first step; the second stage has died, and its state
    can be had.
    """
    bootstrap = await swarm.bootstrap(*options, **how)
    holder = swarm.volunteer("holder", fail="send_gradient:3")
    assert (await holder.blocks())[0] == BORDER
    sender = swarm.volunteer("sender")
    await swarm.gone(holder)
    return bootstrap, sender


def events(swarm: Swarm, child: Child, kind: str) -> list[dict[str, Any]]:
    """What `child` says of the first step."""
    path = swarm.run.volunteers / f"{child.peer_id}.jsonl"
    said = [read_event(line)[1] for _, line in read_events(path)]
    return [event for event in said if (event["kind"], event["step"]) == (kind, 0)]


async def test_a_leftover_reaches_a_holder_that_its_sender_never_knew(
    swarm: Swarm, reference: ReferenceRun
) -> None:
    bootstrap, sender = await orphaned(swarm)
    look = swarm.start("look", "status", "--json", "--bootstrap", swarm.address)
    assert await look.ended() == 0, look.said
    (left,) = json.loads(look.printed)["leftovers"]
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
    swarm.exact(reference)


async def test_the_reliable_peer_completes_what_nobody_else_does(
    swarm: Swarm, reference: ReferenceRun
) -> None:
    bootstrap, sender = await orphaned(swarm, "--stand-in", before="hasty_stand_in")
    await swarm.finished(bootstrap, sender)
    helper = Identity.load(swarm.run.path / "stand-in" / "identity.key").peer_id
    assert (swarm.run.volunteers / f"{helper}.jsonl").exists()
    assert not swarm.records("rollback")
    assert audit(swarm.run.path).leftovers > 0
    swarm.exact(reference)


@pytest.mark.grid
@pytest.mark.parametrize("cell", NEWCOMER)
async def test_a_newcomer_dies_as_well(swarm: Swarm, reference: ReferenceRun, cell: str) -> None:
    bootstrap, sender = await orphaned(swarm)
    newcomer = swarm.volunteer("newcomer", fail=cell)
    assert await newcomer.ended() == -signal.SIGKILL, newcomer.said
    last = swarm.volunteer("last")
    await swarm.finished(bootstrap, sender, last)
    swarm.exact(reference)
