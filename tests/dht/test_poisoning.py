"""What hivemind's DHT lets anybody do, tried at real nodes: each of seven ways is refused, or nobody
believes it.

Mallory speaks the protocol without any rule of its own, as a changed program would.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import pytest_asyncio
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration

from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia import records
from hetpeer.dht.kademlia.records import OwnerValidator
from hetpeer.dht.kademlia.table import MAX_PAYLOAD, MAX_RECORDS, MAX_TTL_S, KnownKeys, shard_of
from hetpeer.dht.node.node import Node, NodeConfig
from tests.dht.identities import identities

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.xdist_group("dht-network"),
    pytest.mark.asyncio(loop_scope="module"),
]
RUN = "poisoned"
AT_ONCE = 100
"""Records in one call."""
BIG = {"a": bytes(MAX_PAYLOAD - 32)}


class Anything(RecordValidatorBase):
    """No rule."""

    def validate(self, _record: DHTRecord) -> bool:
        return True


class Mallory:
    """A node whose DHT does as it is told."""

    def __init__(self, node: Node, victim: Node) -> None:
        self.node = node
        self.victim = victim
        self.identity = node.identity

    async def protocol(self) -> Any:
        protocol = (await self.node.session()).dht.protocol
        protocol.record_validator = Anything()
        return protocol

    async def puts(
        self,
        key: str,
        records: Sequence[tuple[Any, bytes, float]],
        *,
        in_cache: bool = False,
    ) -> list[bool]:
        """Tell the victim to store (subkey, bytes, expiration) each; whether it says that it has."""
        protocol = await self.protocol()
        said: list[bool] = []
        for first in range(0, len(records), AT_ONCE):
            subkeys, values, expirations = zip(*records[first : first + AT_ONCE], strict=True)
            said += await DHTProtocol.call_store(
                protocol,
                PeerID.from_base58(self.victim.peer_id),
                [DHTID.generate(source=key)] * len(values),
                values,
                list(expirations),
                subkeys,
                in_cache=in_cache,
            )
        return said


def signed(
    identity: Identity, key: str, value: Any, *, subkey: str = "", expires: float | None = None
) -> tuple[str, bytes, float]:
    """A record as `identity` would write it, whatever the rule says of that."""
    subkey = subkey or identity.peer_id
    expires = time.time() + 60 if expires is None else expires
    plain = DHTRecord(
        DHTID.generate(source=key).to_bytes(), msgpack.packb(subkey), msgpack.packb(value), expires
    )
    signer = OwnerValidator(identity, SystemClock(), KnownKeys())
    return subkey, signer.sign_value(plain), expires


async def started(folder: Path, name: str, *peers: Node) -> Node:
    places = tuple(parse_address(peer.addresses()[0]) for peer in peers)
    return await Node.start(NodeConfig(peers=places), Identity.create(folder / name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Node, Node, Node]]:
    """An honest one, another one that reads, and one more."""
    folder = tmp_path_factory.mktemp("nodes")
    running: list[Node] = []
    try:
        for name in ("honest", "reader", "mallory"):
            running.append(await started(folder, name, *running[:1]))
        yield running[0], running[1], running[2]
    finally:
        for node in running:
            await node.close()


@pytest.fixture
def mallory(nodes: tuple[Node, Node, Node]) -> Mallory:
    return Mallory(nodes[2], nodes[0])


@pytest_asyncio.fixture(loop_scope="module")
async def key(nodes: tuple[Node, Node, Node]) -> str:
    """That of the honest node's advert, which is there."""
    Roster(nodes[1], RUN)
    roster = Roster(nodes[0], RUN)
    assert await roster.publish(Advert(name="honest"))
    return roster._key(nodes[0].peer_id)


async def names(reader: Node) -> set[str]:
    return {advert.name for advert in (await Roster(reader, RUN).read()).values()}


async def believed(reader: Node, liar: Node, key: str) -> set[str]:
    """Whose records `reader` takes from an answer of `liar`."""
    place = DHTID.generate(source=key)
    found = await (await reader.session()).dht.protocol.call_find(PeerID.from_base58(liar.peer_id), [place])
    assert found is not None, "it answers"
    value, _ = found[place]
    return set() if value is None else set(value.value.data)


async def still_there(nodes: tuple[Node, Node, Node]) -> None:
    """The honest advert is read by somebody else, and can be renewed."""
    honest, reader, _ = nodes
    assert "honest" in await names(reader)
    assert await Roster(honest, RUN).publish(Advert(name="honest"))


async def test_1_an_unsigned_subkey_beside_signed_ones(nodes, mallory: Mallory, key: str) -> None:
    value = msgpack.packb({"name": "unsigned"})
    expires = time.time() + 60
    peer = mallory.node.peer_id
    assert await mallory.puts(key, [(peer, value, expires), ("anything", value, expires)]) == [False, False]
    assert await names(nodes[1]) == {"honest"}
    await still_there(nodes)


@pytest.mark.parametrize("in_cache", [False, True])
async def test_2_a_plain_value_over_signed_subkeys(nodes, mallory: Mallory, key: str, in_cache: bool) -> None:
    said = await mallory.puts(key, [(None, msgpack.packb("wiped"), time.time() + 100)], in_cache=in_cache)
    assert said == [False]
    await still_there(nodes)


async def test_2_a_cached_record_that_expires_later_hides_nobody(nodes, mallory: Mallory, key: str) -> None:
    """A node would answer with what it caches instead of what it stores."""
    record = signed(mallory.identity, key, {"name": "cached"}, expires=time.time() + MAX_TTL_S - 1)
    assert await mallory.puts(key, [record], in_cache=True) == [False]
    await still_there(nodes)


async def test_3_the_name_of_an_owner_in_a_key_is_no_password(nodes, mallory: Mallory) -> None:
    key = f"hetpeer/[owner:{nodes[0].peer_id}]"
    expires = time.time() + 60
    records = [(None, b"mine", expires), (nodes[0].peer_id, msgpack.packb({}), expires)]
    assert await mallory.puts(key, records) == [False, False]


async def test_4_a_subkey_of_somebody_else_under_ones_own_key(nodes, mallory: Mallory, key: str) -> None:
    victim = nodes[0].peer_id
    forged = [
        signed(mallory.identity, key, {"name": "forged"}, subkey=subkey)
        for subkey in (victim, f"{victim}[owner:{mallory.node.peer_id}]")
    ]
    assert await mallory.puts(key, forged) == [False, False]
    assert await names(nodes[1]) == {"honest"}


async def test_5_a_record_for_ever(nodes, mallory: Mallory, key: str) -> None:
    for expires in (time.time() + 31_700 * 365 * 86400.0, float("inf"), time.time() + MAX_TTL_S + 10):
        pinned = signed(mallory.identity, key, {"name": "pinned"}, expires=expires)
        assert await mallory.puts(key, [pinned]) == [False]
    await still_there(nodes)


async def test_5_who_answers_that_it_knows_for_ever_is_not_the_last_to_be_asked(
    nodes, mallory: Mallory, key: str
) -> None:
    class Lying(DHTLocalStorage):
        def get(self, _key: DHTID) -> ValueWithExpiration:
            return ValueWithExpiration(DictionaryDHTValue(), float("inf"))

    protocol = await mallory.protocol()
    honest, protocol.storage = protocol.storage, Lying()
    try:
        assert await believed(nodes[1], mallory.node, key) == set()
        for _ in range(3):
            await still_there(nodes)
    finally:
        protocol.storage = honest


async def test_5_one_bad_record_in_an_answer_hides_no_other(nodes, mallory: Mallory, key: str) -> None:
    protocol = await mallory.protocol()
    bad = DictionaryDHTValue()
    (one,) = identities(1, lambda peer_id: shard_of(peer_id) == shard_of(nodes[0].peer_id))
    good = signed(one, key, {"name": "good"})
    for subkey, value, expires in (good, ("bad", b"no envelope", time.time() + 60)):
        bad.store(subkey, value, expires)
    honest, protocol.storage = protocol.storage, DHTLocalStorage()
    try:
        protocol.storage.data[DHTID.generate(source=key)] = ValueWithExpiration(bad, time.time() + 60)
        assert await believed(nodes[1], mallory.node, key) == {one.peer_id}
    finally:
        protocol.storage = honest


async def test_6_more_than_anybody_may_have_kept(
    nodes, mallory: Mallory, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under keys that nobody uses, and again and again under one that somebody does."""
    monkeypatch.setattr(records, "MAX_FOREIGN_RECORDS", 60)
    storage = (await nodes[0].session()).dht.protocol.storage
    taken = 0
    for number in range(100):
        foreign = f"rubbish {number}"
        taken += sum(await mallory.puts(foreign, [signed(mallory.identity, foreign, {"a": bytes(1000)})]))
    assert 0 < taken <= 60
    one, now = "rubbish 0", time.time()
    again = [
        signed(mallory.identity, one, {"n": n}, expires=now + MAX_TTL_S - 20 + n / 100) for n in range(500)
    ]
    assert all(await mallory.puts(one, again))
    dictionary = storage.get(DHTID.generate(source=one)).value
    assert max(len(storage.expiration_heap), len(dictionary.expiration_heap)) < 400
    await still_there(nodes)


async def test_7_a_flood_of_one_shard(nodes, mallory: Mallory, key: str, tmp_path: Path) -> None:
    """With 64 kB each a reader would get nothing at all.

    Who is there stays, the other shards do not notice.
    """
    honest, reader, _ = nodes
    flooded = shard_of(honest.peer_id)
    assert await mallory.puts(key, [signed(mallory.identity, key, {"a": bytes(64 << 10)})]) == [False]
    crowd = identities(MAX_RECORDS + 40, lambda peer_id: shard_of(peer_id) == flooded)
    said = await mallory.puts(key, [signed(one, key, BIG) for one in crowd])
    taken = sum(said)
    assert 0 < taken < MAX_RECORDS, "the honest one keeps its place"
    assert not any(said[taken:]), "the rest is refused"
    elsewhere = identities(20, lambda peer_id: shard_of(peer_id) != flooded)
    assert not any(await mallory.puts(key, [signed(one, key, BIG) for one in elsewhere]))
    await still_there(nodes)
    fresh = (Identity.create(tmp_path / f"{number}") for number in itertools.count())
    identity = next(one for one in fresh if shard_of(one.peer_id) != flooded)
    newcomer = await Node.start(NodeConfig(peers=(parse_address(honest.addresses()[0]),)), identity)
    try:
        assert await Roster(newcomer, RUN).publish(Advert(name="newcomer"))
        assert {"honest", "newcomer"} <= await names(reader)
        assert "honest" in await names(newcomer), "who has never read before sees it as well"
    finally:
        await newcomer.close()


async def test_7_an_answer_that_is_too_long_is_not_looked_at(nodes, mallory: Mallory, key: str) -> None:
    protocol = await mallory.protocol()
    flood = DictionaryDHTValue()
    shard = shard_of(nodes[0].peer_id)
    for one in identities(MAX_RECORDS + 1, lambda peer_id: shard_of(peer_id) == shard):
        flood.store(*signed(one, key, {"name": "crowd"}))
    honest, protocol.storage = protocol.storage, DHTLocalStorage()
    try:
        protocol.storage.data[DHTID.generate(source=key)] = ValueWithExpiration(flood, time.time() + 60)
        assert await believed(nodes[1], mallory.node, key) == set()
        del flood[next(iter(flood.data))]
        assert len(await believed(nodes[1], mallory.node, key)) == MAX_RECORDS, "as many as there may be"
        await still_there(nodes)
    finally:
        protocol.storage = honest
