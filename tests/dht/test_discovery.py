"""The one rule for DHT records, case by case, and what an advert lets in. test_node.py attacks a real DHT."""

from __future__ import annotations

import dataclasses
import math

import msgpack
import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.discovery import MAX_LINKS, Advert, LinkNote
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia.records import MAX_KEY, OwnerValidator
from hetpeer.dht.kademlia.table import MAX_PAYLOAD, MAX_TTL_S, KnownKeys, digest

NOW = 1_000_000.0


class StoppedClock:
    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return NOW


@pytest.fixture(scope="module")
def alice(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.create(tmp_path_factory.mktemp("alice") / "key")


@pytest.fixture(scope="module")
def mallory(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.create(tmp_path_factory.mktemp("mallory") / "key")


@pytest.fixture(scope="module")
def rule(mallory: Identity) -> OwnerValidator:
    """The validator of a peer that is neither the signer nor asked to be."""
    return OwnerValidator(mallory, StoppedClock(), KnownKeys())


def signed(identity: Identity, value: object, *, subkey: str | None = None, ttl_s: float = 30.0) -> DHTRecord:
    plain = DHTRecord(b"k" * 20, msgpack.packb(subkey or identity.peer_id), msgpack.packb(value), NOW + ttl_s)
    return dataclasses.replace(
        plain, value=OwnerValidator(identity, StoppedClock(), KnownKeys()).sign_value(plain)
    )


def test_a_record_under_its_signers_id_is_accepted_and_unwrapped(
    alice: Identity, rule: OwnerValidator
) -> None:
    record = signed(alice, {"name": "alice"}, ttl_s=MAX_TTL_S)
    assert rule.validate(record)
    assert msgpack.unpackb(rule.strip_value(record)) == {"name": "alice"}


def test_a_plain_value_is_refused(alice: Identity, rule: OwnerValidator) -> None:
    no_subkey = msgpack.packb(None)
    plain = DHTRecord(b"k" * 20, no_subkey, msgpack.packb({"a": 1}), NOW + 30)
    assert not rule.validate(plain)
    assert not rule.validate(
        dataclasses.replace(plain, value=OwnerValidator(alice, StoppedClock(), KnownKeys()).sign_value(plain))
    )


def test_an_unsigned_value_is_refused(alice: Identity, rule: OwnerValidator) -> None:
    record = signed(alice, {})
    assert not rule.validate(dataclasses.replace(record, value=msgpack.packb({"a": 1})))


def test_a_foreign_subkey_is_refused(alice: Identity, mallory: Identity, rule: OwnerValidator) -> None:
    assert not rule.validate(signed(mallory, {}, subkey=alice.peer_id))


@pytest.mark.parametrize("ttl_s", [MAX_TTL_S + 1, 1e9, math.inf, math.nan])
def test_an_expiration_far_ahead_is_refused(alice: Identity, rule: OwnerValidator, ttl_s: float) -> None:
    assert not rule.validate(signed(alice, {}, ttl_s=ttl_s))


def test_a_value_over_two_kilobytes_is_refused(alice: Identity, rule: OwnerValidator) -> None:
    overhead = len(msgpack.packb({"a": bytes(1000)})) - 1000
    assert rule.validate(signed(alice, {"a": bytes(MAX_PAYLOAD - overhead)}))
    assert not rule.validate(signed(alice, {"a": bytes(MAX_PAYLOAD - overhead + 1)}))


@pytest.mark.parametrize("value", [1, [1], None, {"a": msgpack.ExtType(0x50, b"junk")}])
def test_a_value_that_is_no_plain_map_is_refused(
    alice: Identity, rule: OwnerValidator, value: object
) -> None:
    assert not rule.validate(signed(alice, value))


@pytest.mark.parametrize(
    "change", [{"key": b"l" * 20}, {"expiration_time": NOW + 31}, {"expiration_time": NOW + 29}]
)
def test_a_record_cannot_be_replayed_elsewhere_or_later(
    alice: Identity, rule: OwnerValidator, change: dict[str, object]
) -> None:
    assert not rule.validate(dataclasses.replace(signed(alice, {"a": 1}), **change))


def test_a_changed_value_is_refused(alice: Identity, rule: OwnerValidator) -> None:
    record = signed(alice, {"a": 1})
    assert not rule.validate(dataclasses.replace(record, value=record.value[:-1] + b"\x02"))


def test_a_peer_that_is_not_admitted_under_a_key_is_refused(alice: Identity, mallory: Identity) -> None:
    keys = KnownKeys()
    rule = OwnerValidator(mallory, StoppedClock(), keys)
    record = dataclasses.replace(signed(alice, {}), key=digest("peers/3"))
    record = dataclasses.replace(record, value=msgpack.packb({}))
    record = dataclasses.replace(record, value=OwnerValidator(alice, StoppedClock(), keys).sign_value(record))
    assert rule.validate(record), "a key that nobody here knows"
    keys.declare("peers/3", lambda peer_id: peer_id != alice.peer_id)
    assert not rule.validate(record)


@pytest.mark.parametrize(
    "change", [{"value": {"a": 1}}, {"value": 7}, {"expiration_time": "soon"}, {"expiration_time": None}]
)
def test_what_is_no_bytes_or_no_time_is_refused(
    alice: Identity, rule: OwnerValidator, change: dict[str, object]
) -> None:
    assert not rule.validate(dataclasses.replace(signed(alice, {}), **change))


def test_a_key_of_any_length_is_judged(alice: Identity, rule: OwnerValidator) -> None:
    record = signed(alice, {"a": 1})
    for length in (0, MAX_KEY, MAX_KEY + 1, 1 << 20):
        assert not rule.validate(dataclasses.replace(record, key=bytes(length)))


def test_a_record_is_one_msgpack_map_with_its_writers_key_and_signature(alice: Identity) -> None:
    found = MSGPackSerializer.loads(signed(alice, {"name": "alice"}).value)
    assert found == {
        "key": alice.public_bytes,
        "signature": found["signature"],
        "record": {"name": "alice"},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"record": {"a": 2}},
        {"signature": b""},
        {"signature": "text"},
        {"key": None},
        {"key": [[[]]]},
        {"more": 1},
    ],
)
def test_a_map_of_another_form_is_refused(
    alice: Identity, rule: OwnerValidator, change: dict[str, object]
) -> None:
    record = signed(alice, {"a": 1})
    entries = msgpack.unpackb(record.value)
    assert rule.validate(dataclasses.replace(record, value=msgpack.packb(entries)))
    assert not rule.validate(dataclasses.replace(record, value=msgpack.packb(entries | change)))
    turned = dict(reversed(entries.items()))
    assert not rule.validate(dataclasses.replace(record, value=msgpack.packb(turned)))


@given(junk=st.binary(max_size=600), cut=st.integers(0, 600), whole=st.booleans())
def test_no_bytes_make_the_rule_raise(
    alice: Identity, rule: OwnerValidator, junk: bytes, cut: int, *, whole: bool
) -> None:
    value = junk if whole else signed(alice, {}).value[:cut] + junk
    if value != signed(alice, {}).value:
        assert not rule.validate(DHTRecord(b"k" * 20, msgpack.packb(alice.peer_id), value, NOW + 30))


def test_an_advert_survives_the_round_trip() -> None:
    advert = Advert(
        name="alice's box".replace("'", ""),
        addresses=("/ip4/1.2.3.4/tcp/1/p2p/Qm",),
        role="volunteer",
        state="working",
        block_begin=2,
        block_end=5,
        step=10,
        loss=3.5,
        tokens_per_second=12.0,
        memory_bytes=2**33,
        host_bytes=2**34,
        gpu_bytes=2**34,
        uplink=2.5e6,
        downlink=12.5e6,
        coordinate=(1234, -5678, 9, 1500, 7),
        device="2 x A10",
    )
    packed = msgpack.packb(advert.to_map())
    assert len(packed) < MAX_PAYLOAD
    assert Advert.from_map(msgpack.unpackb(packed), peer="p") == advert


def test_the_fullest_advert_fits_into_a_record(alice: Identity, rule: OwnerValidator) -> None:
    """Every field set, as long as it gets; 8 addresses as they are: IPv6 or a relay's, with a peer id."""
    long = 1_234_567.890123
    whole = {
        name: (1 << 40 if info.annotation is int else long if info.annotation is float else "x" * 32)
        for name, info in Advert.model_fields.items()
        if info.annotation in (int, float, str)
    }
    link = LinkNote(
        to="x" * 8,
        rate=12_345_678.0,
        trip_s=0.1234,
        activation_bytes=1 << 30,
        gradient_bytes=1 << 30,
        ratio=99.25,
        codec="topk-bf16",
        aim_s=123.4567,
        saved_bytes=1 << 40,
        path="through " + "x" * 8,
    )
    places = tuple(
        f"/ip6/2001:db8:1234:5678:9abc:def0:1234:{n}/tcp/31330/p2p/{alice.peer_id}" for n in range(8)
    )
    words = {
        "version": 1,
        "role": "volunteer",
        "state": "disconnected",
        "reach": "private",
        "offload": "auto",
    }
    lists = {
        "addresses": places,
        "coordinate": (-100_000,) * 4 + (100,),
        "relays": ("x" * 8,) * MAX_LINKS,
        "links": (link,) * MAX_LINKS,
    }
    shares = {
        "computes": 0.333,
        "waits_data": 0.333,
        "waits_room": 0.333,
        "varies": 0.123,
        "processor_part": 0.333,
        "loss": long,
    }
    full = Advert(**whole | words | lists | shares)
    assert full.to_map().keys() == Advert.model_fields.keys()
    shown = full.fitting()
    assert rule.validate(signed(alice, shown.to_map()))
    assert 5 <= len(shown.addresses) < len(places), "the first addresses are the ones that others reach"
    assert shown.addresses == places[: len(shown.addresses)]
    assert shown.model_copy(update={"addresses": places}) == full, "nothing else is lost"
    usual = full.model_copy(update={"addresses": places[:5]})
    assert usual.fitting() is usual


def test_names_lose_everything_but_printable_ascii_and_their_tail() -> None:
    hostile = "\x1b[31m<script>alert('x')</script>\r\n\u202eevil\x00" + "a" * 100
    name = Advert(name=hostile).name
    assert len(name) == 32
    assert name.startswith("[31mscriptalert(x)/scriptevil")


def test_unknown_fields_are_ignored() -> None:
    assert Advert.from_map({"version": 1, "name": "a", "hat": "red"}, peer="p") == Advert(name="a")


@pytest.mark.parametrize(
    "value",
    [
        {"version": 2},
        {"version": "1"},
        {"step": -1},
        {"step": 1.5},
        {"loss": math.nan},
        {"tokens_per_second": math.inf},
        {"tokens_per_second": -1.0},
        {"name": 5},
        {"addresses": ["/a"] * 9},
        {"addresses": ["javascript:alert(1)"]},
        {"addresses": ["/" + "a" * 300]},
        {"memory_bytes": 2**60},
    ],
)
def test_an_advert_out_of_bounds_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Advert.from_map({"version": 1} | value, peer="p")
