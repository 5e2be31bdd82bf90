"""Guests of a relay: those of the run stay, others are asked and sent away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node import session_upkeep
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.p2pd.p2pd_process import P2pd
from hetpeer.dht.reach import relay_guests
from hetpeer.dht.reach.relay_guests import BARRED_S, GRACE_S, MAX_BARRED, VISIT_S, GuestChanges, RelayGuests
from hetpeer.dht.reach.relay_slots import reserve
from tests.swarm.child import until

NOTHING = GuestChanges()


def test_a_peer_of_the_run_is_never_asked() -> None:
    guests = RelayGuests()
    for now in (0.0, GRACE_S, 10 * VISIT_S):
        assert guests.look({"one"}, {"one", "other"}, (), now) == NOTHING


def test_a_stranger_is_asked_once_sent_away_and_turned_away_until_it_is_forgotten() -> None:
    guests = RelayGuests()
    assert guests.look({"libp2p"}, None, (), 0.0) == NOTHING
    assert guests.look({"libp2p"}, None, (), GRACE_S) == GuestChanges(ask=("libp2p",))
    guests.answered("libp2p", GRACE_S, ours=False)
    assert guests.look({"libp2p"}, None, (), GRACE_S + 5) == GuestChanges(dismiss=("libp2p",))
    assert guests.look((), None, (), GRACE_S + 10) == NOTHING
    assert guests.look({"libp2p"}, None, (), GRACE_S + 15) == GuestChanges(dismiss=("libp2p",))
    guests.look((), None, (), GRACE_S + 20)
    later = GRACE_S + BARRED_S
    assert guests.look({"libp2p"}, None, (), later) == NOTHING
    assert guests.look({"libp2p"}, None, (), later + GRACE_S) == GuestChanges(ask=("libp2p",))


def test_a_visitor_stays_as_long_as_it_talks_and_anywhere_else_than_at_a_run() -> None:
    guests = RelayGuests()
    for run in (None, {"one"}):
        guests.look((), run, (), 0.0)
        guests.look({"visitor"}, run, (), 0.0)
        guests.answered("visitor", 1.0, ours=True)
        assert guests.look({"visitor"}, run, {"visitor"}, VISIT_S) == NOTHING
        wanted = NOTHING if run is None else GuestChanges(dismiss=("visitor",))
        assert guests.look({"visitor"}, run, (), VISIT_S) == wanted


def test_a_flood_of_strangers_is_not_remembered_without_end() -> None:
    guests = RelayGuests()
    for number in range(MAX_BARRED + 10):
        guests.answered(str(number), 0.0, ours=False)
    everybody = {str(number) for number in range(MAX_BARRED + 10)}
    assert len(guests.look(everybody, None, (), 1.0).dismiss) == MAX_BARRED


@pytest.mark.swarm
@pytest.mark.xdist_group("dht-network")
async def test_a_relay_keeps_hetpeers_slots_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real p2pds: one is a node's, one is anybody's, and both have a slot."""
    monkeypatch.setattr(relay_guests, "GRACE_S", 0.5)
    monkeypatch.setattr(session_upkeep, "TEND_PERIOD_S", 0.3)
    relay = await Node.start(NodeConfig(reachability="public"), Identity.create(tmp_path / "relay"))
    there = parse_address(relay.addresses()[0])
    private = NodeConfig(reachability="private", peers=(there,), relays=(there,))
    ours = await Node.start(private, Identity.create(tmp_path / "ours"))
    identity = Identity.create(tmp_path / "stranger")
    stranger = await P2pd.start(NodeConfig(), identity, port=0)
    try:
        control = P2pdControl(stranger.control_path)
        await control.connect(there, 5.0)
        assert (await reserve(control, relay.peer_id, 5.0)).expires

        async def connected(peer: str) -> bool:
            connections = await (await relay.session()).control.connections()
            return peer in {one for one, _ in connections}

        assert await connected(identity.peer_id)
        deadline = SystemClock().monotonic() + 60
        while await connected(identity.peer_id):
            assert SystemClock().monotonic() < deadline, "the stranger is still there"
            await asyncio.sleep(0.2)
        await until(lambda: ours.relays == [relay.peer_id], "the slot of our own peer", 30.0)
        assert await connected(ours.peer_id)
    finally:
        await stranger.close()
        await ours.close()
        await relay.close()
