"""Our records in a DHT of hivemind's own programs, beside what others store there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.discovery import NOTE_TTL_S, Advert, LeftoverIds, Roster, TaskBoard, TaskNote
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia.table import MAX_RECORDS
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.p2pd.p2pd_process import P2pd
from hetpeer.dht.run_index import RunIndex
from tests.dht.hivemind_programs import client, hivemind_dht

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.xdist_group("dht-network"),
    pytest.mark.asyncio(loop_scope="module"),
]
RUN = "0123456789abcdef" * 2
NOTE = TaskNote(term=1, view=0, step=7, leftovers=(LeftoverIds(border=4, ids=(1,)),))
RUBBISH = """
import asyncio, time
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID

async def main():
    node = await DHTNode.create(initial_peers=ADDRESSES, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    later = time.time() + 100
    form = {"key": b"", "signature": b"", "record": {}}
    values = [None, 7, "text", b"bytes", [1, [2]], {"record": {}}, form, bytes(1 << 20)]
    for key in KEYS:
        junk = [f"junk {number}" for number in range(CROWD)]
        await node.store_many([key] * CROWD, junk, later, subkeys=junk)
        for number, value in enumerate(values):
            await node.store_many([key] * 2, [value] * 2, later + number, subkeys=[f"{number}", PEER])
        for peer in node.protocol.routing_table.uid_to_peer_id.values():
            raw = [[DHTID.generate(key)] * 2, [b"\\xc1\\xff"] * 2, [later + 50] * 2, [PEER, None]]
            await node.protocol.call_store(peer, *raw)
    await node.shutdown()

asyncio.run(main())
"""


class ShiftedClock:
    """This machine's, but `shift` seconds later by the wall."""

    shift = 0.0

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time() + self.shift


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    """Address of a running `hivemind-dht`."""
    async with hivemind_dht() as place:
        yield place


@pytest_asyncio.fixture(loop_scope="module")
async def running() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def started(running: AsyncExitStack, identity: Path, address: str, clock: Any = None) -> Node:
    config = NodeConfig(peers=(parse_address(address),))
    node = await Node.start(config, Identity.create(identity), clock=clock)
    running.push_async_callback(node.close)
    return node


async def kept(node: Node, address: str, key: str) -> dict[str, Any]:
    """The valid records under `key` in the answer of the node at `address`: peer → its record."""
    place = DHTID.generate(source=key)
    peer = PeerID.from_base58(parse_address(address).peer_id)
    found = await (await node.session()).dht.protocol.call_find(peer, [place])
    assert found is not None, "it answers"
    value, _ = found[place]
    records = {} if value is None else {peer: one.value for peer, one in value.value.items()}
    return {peer: MSGPackSerializer.loads(one)["record"] for peer, one in records.items()}


async def test_adverts_and_boards_outlive_a_clock_that_was_set_back(
    tmp_path: Path, address: str, running: AsyncExitStack
) -> None:
    """hivemind's node would refuse the later ones, and lose the earlier ones a second after."""
    clock = ShiftedClock()
    node = await started(running, tmp_path / "key", address, clock)
    roster, board = Roster(node, RUN), TaskBoard(node, RUN)
    assert await roster.publish(Advert(name="earlier"), ttl_s=60.0)
    assert await board.post(4, NOTE.model_copy(update={"step": 6}))
    clock.shift = 1.0 - NOTE_TTL_S
    await roster.publish(Advert(name="later"), ttl_s=NOTE_TTL_S)
    await board.post(4, NOTE)
    clock.shift = 0.0
    await asyncio.sleep(1.5)
    adverts = await kept(node, address, roster._key(node.peer_id))
    notes = await kept(node, address, f"{board._prefix}/4")
    assert adverts[node.peer_id]["name"] == "later"
    assert notes[node.peer_id]["step"] == 7


async def test_foreign_records_under_our_keys_harm_nobody(
    tmp_path: Path, address: str, running: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every type and form, more than a key may have, under the peer's own id, and in place of all."""
    honest = await started(running, tmp_path / "honest", address)
    reader = await started(running, tmp_path / "reader", address)
    roster, board, index = Roster(honest, RUN), TaskBoard(honest, RUN), RunIndex(honest)
    seen = Roster(reader, RUN), TaskBoard(reader, RUN), RunIndex(reader)
    keys = [roster._key(honest.peer_id), f"{board._prefix}/4", index._key]
    caplog.set_level(logging.INFO)
    await client(
        RUBBISH,
        ADDRESSES=[address, honest.addresses()[0]],
        KEYS=keys,
        PEER=honest.peer_id,
        CROWD=MAX_RECORDS + 44,
    )
    assert await roster.publish(Advert(name="honest"))
    assert await board.post(4, NOTE)
    assert await index.register(RUN)
    adverts, notes, runs = await seen[0].read(), await seen[1].read([4]), await seen[2].read()
    assert adverts[honest.peer_id].name == "honest"
    assert notes[honest.peer_id] == [NOTE]
    assert runs == [RUN]
    assert reader.dht.refused > MAX_RECORDS
    told = [record for record in caplog.records if "did not write" in record.message]
    assert len(told) <= 2, "one line for each of two nodes"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_clock_that_is_off_is_noticed_at_a_node_of_hiveminds_own(
    tmp_path: Path, address: str, running: AsyncExitStack
) -> None:
    clock = ShiftedClock()
    clock.shift = -600.0
    with pytest.raises(LocalError, match="HP-NET-004: this machine's clock is 600 s behind"):
        await started(running, tmp_path / "key", address, clock)


async def test_what_is_neither_ours_nor_hiveminds_is_no_way_in(
    tmp_path: Path, running: AsyncExitStack
) -> None:
    """A libp2p program that speaks neither protocol."""
    bare = await P2pd.start(NodeConfig(), Identity.create(tmp_path / "bare"), port=0)
    running.push_async_callback(bare.close)
    (place, *_) = await P2pdControl(bare.control_path).own_addresses()
    with pytest.raises(LocalError, match="HP-NET-002") as caught:
        await started(running, tmp_path / "key", str(place))
    assert "neither a hetpeer of this version nor a node of hivemind's DHT" in caught.value.why
