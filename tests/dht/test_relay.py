"""Relays among real p2pds on loopback: slots, circuits, a relay that dies, and one that lets too little
pass.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.reach.dialback import PROTOCOL
from hetpeer.dht.reach.relay_slots import reserve
from hetpeer.dht.streams.stream import Stream

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.xdist_group("dht-network"),
    pytest.mark.asyncio(loop_scope="module"),
]
ECHO = "test/1/echo"
Three = tuple[Node, Node, Node]


async def echo(stream: Stream) -> None:
    while True:
        await stream.receive(timeout_s=30)
        await stream.send({}, await stream.receive_bytes(64 << 20))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Three]:
    """A relay, and two private nodes that reach each other through it alone."""
    folder = tmp_path_factory.mktemp("three")
    async with AsyncExitStack() as stack:

        async def start(name: str, config: NodeConfig) -> Node:
            node = await Node.start(config, Identity.create(folder / name))
            stack.push_async_callback(node.close)
            node.may_cut(ECHO)
            await node.serve(ECHO, echo)
            return node

        relay = await start("relay", NodeConfig(reachability="public"))
        there = (parse_address(relay.addresses()[0]),)
        private = NodeConfig(reachability="private", peers=there, relays=there)
        yield relay, await start("one", private), await start("other", private)


async def ask_echo(node: Node, peer_id: str, data: bytes) -> bytes:
    async with await node.open(peer_id, ECHO) as stream:
        await stream.send({}, data)
        await stream.receive(timeout_s=20)
        return bytes(await stream.receive_bytes(64 << 20, timeout_s=20))


async def test_a_circuit_carries_more_than_libp2ps_own_limit(three: Three) -> None:
    relay, one, other = three
    await served(relay, one, other)
    assert await ask_echo(one, other.peer_id, bytes(1 << 20)) == bytes(1 << 20)
    async with asyncio.timeout(60):
        while not str(one.path(other.peer_id)).startswith(f"through {relay.peer_id[-8:]}: "):
            await asyncio.sleep(0.05)
    path = one.path(other.peer_id)
    assert path is not None
    assert path.why in ("no answer", "no address")


async def test_nobody_is_dialled_back_through_a_circuit(three: Three) -> None:
    _, one, other = three
    async with await one.open(other.peer_id, PROTOCOL) as stream:
        await stream.send({"ports": [4001]})
        assert "refused" in (await stream.receive(timeout_s=5)).header


@pytest.mark.alone
async def test_a_relay_that_dies_is_used_again_when_it_is_back(three: Three) -> None:
    relay, one, other = three
    assert await back_after(relay, one, other) < 10
    await served(relay, one, other)
    assert (one.restarts, other.restarts) == (0, 0)


@pytest.mark.proof
@pytest.mark.alone
async def test_a_private_peer_whose_p2pd_dies_is_reached_again(three: Three) -> None:
    """The others were told meanwhile that it has no slot, and would not try again for 5 s: it calls them."""
    relay, one, other = three
    assert await back_after(other, one, other) < 10
    await served(relay, one, other)


async def served(relay: Node, *nodes: Node) -> None:
    """Return when all have a slot: one of two is enough for streams between them."""
    async with asyncio.timeout(60):
        while not all(node.relays == [relay.peer_id] for node in nodes):
            await asyncio.sleep(0.05)


async def back_after(victim: Node, one: Node, other: Node) -> float:
    """Seconds from the death of the p2pd of `victim` until streams from `one` to `other` work again."""
    stream = await one.open(other.peer_id, ECHO)
    assert victim.p2pd_pid is not None
    os.kill(victim.p2pd_pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerLostError):
        await stream.receive(timeout_s=5)
    async with asyncio.timeout(60):
        while True:
            try:
                assert await ask_echo(one, other.peer_id, b"again") == b"again"
                return time.monotonic() - began
            except PeerLostError:
                await asyncio.sleep(0.1)


async def test_a_relay_as_libp2p_makes_it_is_known_for_useless(three: Three, tmp_path: Path) -> None:
    """A node that was not told to relay does so for 128 KiB and two minutes."""
    relay, one, _ = three
    control = (await one.session()).control
    assert (await reserve(control, relay.peer_id, 5)).useful
    small = await Node.start(NodeConfig(), Identity.create(tmp_path / "small"))
    try:
        await one.connect(parse_address(small.addresses()[0]))
        offer = await reserve(control, small.peer_id, 5)
        assert (offer.max_bytes, offer.max_seconds, offer.useful) == (128 << 10, 120, False)
    finally:
        await small.close()
