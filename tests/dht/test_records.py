"""What a DHT node keeps for others: so much under one key, so much of what it does not know, and nothing
for longer than it may.
"""

import math
import time

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import timed_storage
from hypothesis import example, given
from hypothesis import strategies as st

from hetpeer.dht.kademlia import records
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.kademlia.records import MAX_ENVELOPE, RecordStorage, Serializer, _believed
from hetpeer.dht.kademlia.table import (
    MAX_PAYLOAD,
    MAX_RECORDS,
    MAX_TTL_S,
    SHARDS,
    KnownKeys,
    Table,
    digest,
    shard_of,
)
from tests.dht.identities import identities

UNARY_BYTES = 4 << 20
"""What libp2p's unary calls carry."""
SOON = 60.0


class Clock:
    """hivemind's as well."""

    now = 0.0
    shift = 0.0
    """Seconds by which the wall clock was set."""

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_800_000_000.0 + self.now + self.shift


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_storage, "get_dht_time", clock.wall)
    return clock


@pytest.fixture
def storage(clock: Clock) -> RecordStorage:
    keys = KnownKeys()
    keys.declare("ours", lambda _peer: True)
    return RecordStorage(keys, clock)


OURS = DHTID.generate(source="ours")


def put(storage: RecordStorage, key: DHTID, peer: str, seconds: float = SOON) -> bool:
    return storage.store(key, b"value", timed_storage.get_dht_time() + seconds, subkey=peer)


def test_a_key_is_where_hivemind_has_it() -> None:
    assert digest("hetpeer/3/run/peers/3") == DHTID.generate(source="hetpeer/3/run/peers/3").to_bytes()


TURNS = st.tuples(st.floats(0.0, 30.0), st.floats(-40.0, 40.0), st.floats(0.1, MAX_TTL_S))


@given(turns=st.lists(TURNS, min_size=1, max_size=20))
@example(turns=[(0.0, 0.0, 30.0), (1.0, -29.0, 30.0), (1.0, 0.0, 2.0)])
def test_a_record_never_expires_before_the_one_before_it(turns: list[tuple[float, float, float]]) -> None:
    """Whatever the wall clock does between two stores, and for however short a time the later one is made.

    Turns: seconds until the store, by which the wall clock is set besides, and for how long it is made.
    """
    clock = Clock()

    async def never() -> NetworkSession:
        raise AssertionError

    table, last, seconds = Table(never, "peer", clock, KnownKeys()), -math.inf, 0.0
    for passed, step, ttl_s in turns:
        seconds += passed
        clock.now, clock.shift = seconds, clock.shift + step
        expires = table._expiration("key", ttl_s)
        assert expires <= clock.wall() + MAX_TTL_S, "or everybody refuses it"
        assert expires > last or expires == clock.wall() + MAX_TTL_S
        assert expires >= min(clock.wall() + ttl_s, clock.wall() + MAX_TTL_S)
        last = expires


def test_a_full_key_takes_nobody_new_and_renews_who_is_there(storage: RecordStorage) -> None:
    assert all(put(storage, OURS, f"peer {n}") for n in range(MAX_RECORDS))
    assert not put(storage, OURS, "one more")
    assert put(storage, OURS, "peer 0", SOON + 1)
    assert len(storage.get(OURS).value) == MAX_RECORDS


def test_who_does_not_renew_makes_room(storage: RecordStorage, clock: Clock) -> None:
    assert all(put(storage, OURS, f"peer {n}") for n in range(MAX_RECORDS - 1))
    assert put(storage, OURS, "short", 5.0)
    assert not put(storage, OURS, "one more")
    clock.now += 6.0
    assert put(storage, OURS, "one more")


def test_an_older_record_changes_nothing_of_a_newer_one(storage: RecordStorage, clock: Clock) -> None:
    """hivemind refuses it, and lets the newer one expire with it."""
    assert put(storage, OURS, "alice", SOON)
    assert not put(storage, OURS, "alice", 5.0)
    clock.now += 6.0
    assert "alice" in storage.get(OURS).value


def test_a_plain_value_is_not_kept(storage: RecordStorage) -> None:
    assert put(storage, OURS, "alice")
    assert not storage.store(OURS, b"wiped", timed_storage.get_dht_time() + 100)
    assert "alice" in storage.get(OURS).value


def test_renewing_a_record_leaves_nothing_behind(storage: RecordStorage) -> None:
    for number in range(2000):
        assert put(storage, OURS, "alice", SOON + number / 100)
    assert len(storage.expiration_heap) < 100
    assert len(storage.get(OURS).value.expiration_heap) < 100


def test_foreign_keys_share_their_room_and_take_none_of_ours(
    storage: RecordStorage, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_FOREIGN_RECORDS", 50)

    def tries(times: int, seconds: float = SOON) -> int:
        return sum(put(storage, DHTID.generate(), "mallory", seconds) for _ in range(times))

    assert tries(30, records.RECOUNT_S / 2) == 30
    assert tries(100) == 20
    assert put(storage, OURS, "alice")
    clock.now += 0.6 * records.RECOUNT_S
    assert tries(100) == 0, "it has just counted them"
    clock.now += records.RECOUNT_S
    assert tries(100) == 30


def test_the_answer_with_the_most_that_is_asked_for_at_once_fits_into_one_message() -> None:
    """With the longest public key and signature, and keys that are all full."""
    full = DictionaryDHTValue()
    for number in range(MAX_RECORDS):
        full.store(f"Qm{number:044}", bytes(MAX_ENVELOPE + MAX_PAYLOAD), time.time() + 100)
    at_once = int(SHARDS**0.5)
    assert at_once * len(full.packb()) < 0.95 * UNARY_BYTES


def test_thousands_of_peers_are_spread_over_shards_without_filling_one() -> None:
    rounds = [shard_of(f"peer {n}") for n in range(3000)]
    fullest = max(map(rounds.count, range(SHARDS)))
    assert min(map(rounds.count, range(SHARDS))) > 0
    assert fullest < MAX_RECORDS


def test_cheap_identities_are_as_good_as_others() -> None:
    """Or the tests of floods would show nothing."""
    some = identities(3)
    assert len({one.peer_id for one in some}) == 3


def test_records_with_subkeys_of_any_type_hide_no_other() -> None:
    """hivemind cannot even read them: it does not know which of a text and a number is the smaller one."""
    expires = time.time() + 9
    odd = [
        [7, b"", expires],
        [["list"], b"", expires],
        ["b", 7, expires],
        ["c", b"", None],
    ]
    items = [["alice", b"value", expires], *odd, ["bob", b"value", expires]]
    packed = msgpack.packb([None, expires, items])
    with pytest.raises(TypeError):
        DictionaryDHTValue.unpackb(packed)
    read = Serializer.loads(msgpack.packb(msgpack.ExtType(0x50, packed)))
    assert isinstance(read, DictionaryDHTValue)
    assert set(read.data) == {"alice", "bob"}
    assert set(Serializer.loads(Serializer.dumps(read)).data) == {"alice", "bob"}


def test_what_an_answer_says_of_all_its_records_is_not_believed() -> None:
    forever = DictionaryDHTValue()
    forever.latest_expiration_time = float("inf")
    assert _believed(None) is None
    assert _believed(records.ValueWithExpiration(forever, float("inf"))) is None
    assert _believed(records.ValueWithExpiration(msgpack.packb({}), float("inf"))) is None
    expires = time.time() + 9
    forever.store("alice", b"value", expires)
    believed = _believed(records.ValueWithExpiration(forever, float("inf")))
    assert believed.expiration_time == expires
    assert "alice" in believed.value
