"""A peer that was away is found again within a try of its return, by real p2pd processes on loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.channels.redial import LONGEST_PAUSE_S, pause_s
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.streams.stream import Stream

pytestmark = [pytest.mark.swarm, pytest.mark.xdist_group("dht-network")]
PROTOCOL = "outage/1"


async def hear(stream: Stream) -> None:
    await stream.receive()


@pytest.mark.parametrize("away_s", [6.0, pytest.param(60.0, marks=pytest.mark.proof)])
async def test_a_peer_that_was_away_is_found_within_a_try(tmp_path: Path, away_s: float) -> None:
    """libp2p alone would wait longer after each dial in vain: 25 s after a minute."""
    theirs = Identity.create(tmp_path / "theirs")

    async def serve(port: int) -> Node:
        node = await Node.start(NodeConfig(host="127.0.0.1", port=port, alone_ok=True), theirs)
        await node.serve(PROTOCOL, hear)
        return node

    async def found() -> float:
        for attempt in range(10_000):
            try:
                (await node.open(theirs.peer_id, PROTOCOL, timeout_s=5.0)).abort()
                return asyncio.get_running_loop().time()
            except PeerLostError:
                await asyncio.sleep(pause_s(attempt))
        raise AssertionError

    peer = await serve(0)
    address = parse_address(peer.addresses()[0])
    assert address.socket is not None
    node = await Node.start(
        NodeConfig(host="127.0.0.1", port=0, peers=(address,)), Identity.create(tmp_path / "ours")
    )
    try:
        (await node.open(theirs.peer_id, PROTOCOL, timeout_s=5.0)).abort()
        await peer.close()
        finding = asyncio.create_task(found())
        await asyncio.sleep(away_s)
        peer = await serve(address.socket[1])
        back = asyncio.get_running_loop().time()
        assert await finding - back < min(2.5, LONGEST_PAUSE_S)
    finally:
        await node.close()
        await peer.close()
