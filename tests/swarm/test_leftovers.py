"""Work that nobody holds any more finds a new holder through the DHT, in the middle of its step."""

import json

import pytest

from hetpeer.bootstrap.audit import audit
from hetpeer.bootstrap.eventlog import read_event, read_events
from hetpeer.bootstrap.replay import ReferenceRun
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def test_a_leftover_reaches_a_holder_that_its_sender_never_knew(
    swarm: Swarm, reference: ReferenceRun
) -> None:
    """The second stage dies in the first step, whose state can be had; somebody comes who was not there when it began."""
    bootstrap = await swarm.bootstrap()
    holder = swarm.volunteer("holder", fail="send_gradient:3")
    assert (await holder.blocks())[0] == 3
    sender = swarm.volunteer("sender")
    await swarm.gone(holder)

    look = swarm.start("look", "status", "--json", "--bootstrap", swarm.address)
    assert await look.ended() == 0, look.said
    (left,) = json.loads(look.printed)["leftovers"]
    assert (left["sender"], left["block"], left["step"]) == (sender.peer_id, 3, 0)
    assert left["microbatches"] > 0

    newcomer = swarm.volunteer("newcomer")
    await swarm.finished(bootstrap, sender, newcomer)
    assert f"{newcomer.peer_id[-6:]} came into step 0" in sender.said
    assert not swarm.records("rollback")
    events = [
        read_event(line)[1] for _, line in read_events(swarm.run.volunteers / f"{newcomer.peer_id}.jsonl")
    ]
    found = {i for event in events if event["kind"] == "leftover" for i in event["ids"]} & set(range(6))
    counted = {
        i
        for event in events
        if event["kind"] == "applied" and (event["step"], event["block"]) == (0, 3)
        for peer, ids in event["cover"]
        if peer == newcomer.peer_id
        for i in ids
    }
    assert counted == set(range(6))
    assert audit(swarm.run.path).leftovers == len(found) > 0
    swarm.exact(reference)
