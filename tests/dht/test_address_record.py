"""Signed address records: what is believed, what is kept, and how lost peers are found by asking others."""

from __future__ import annotations

import itertools
import random

import pytest

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.identity.address_record import (
    MAX_PLACES,
    AddressBook,
    AddressRecord,
    read_record,
    sign_record,
)
from hetpeer.dht.identity.addresses import Address, at_socket
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.contacts import MEMBERS_ASKED
from hetpeer.dht.node.own_line import LONGEST_S, SILENCE_S, OwnLine


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.create(folder / name) for name in ("one", "other")]


def places(identity: Identity, *ips: str) -> list[Address]:
    return [at_socket(ip, 31330, identity.peer_id) for ip in ips]


def test_a_record_is_what_its_signer_says(identities: list[Identity]) -> None:
    one, _ = identities
    record = sign_record(one, 7, places(one, "127.0.0.1", "192.168.1.2", "51.2.3.4"))
    assert [place.socket for place in record.addresses] == [("51.2.3.4", 31330), ("192.168.1.2", 31330)]
    assert read_record(dict(record.fields)) == record
    assert sign_record(one, 8, places(one, "127.0.0.1")).addresses


def test_forged_records_are_refused(identities: list[Identity]) -> None:
    """Nobody speaks of another peer, and no record can be changed on its way."""
    one, other = identities
    fields = dict(sign_record(one, 7, places(one, "51.2.3.4")).fields)
    elsewhere = [place.text for place in places(one, "51.9.9.9")]
    for wrong in (
        fields | {"number": 8},
        fields | {"addresses": elsewhere},
        fields | {"key": other.public_bytes},
        fields | {"signature": other.sign(b"something")},
        fields | {"addresses": elsewhere * (MAX_PLACES + 1)},
        fields | {"number": -1},
        {},
        None,
    ):
        with pytest.raises(ProtocolError):
            read_record(wrong)
    circuit = f"{places(other, '51.2.3.4')[0]}/p2p-circuit/p2p/{one.peer_id}"
    for claim in (places(other, "51.2.3.4")[0].text, circuit, "/dns4/victim.example/tcp/1", "nonsense"):
        signed = AddressRecord(one.peer_id, 9, (), _signed(one, 9, [claim]))
        with pytest.raises(ProtocolError):
            read_record(signed.fields)


def _signed(identity: Identity, number: int, texts: list[str]) -> dict[str, object]:
    """A record that says what `sign_record` would not."""
    from hetpeer.dht.identity.address_record import _signed_bytes

    return {
        "key": identity.public_bytes,
        "number": number,
        "addresses": texts,
        "signature": identity.sign(_signed_bytes(number, texts)),
    }


def test_the_newest_record_of_a_sought_peer_is_kept_and_no_other(identities: list[Identity]) -> None:
    one, other = identities
    sought = {one.peer_id}
    book = AddressBook(other, lambda: sought)
    old, new = (sign_record(one, n, places(one, f"51.0.0.{n}")) for n in (1, 2))
    assert book.learn(new)
    assert not book.learn(old)
    assert not book.learn(new)
    assert book.of(one.peer_id) == new
    sought.clear()
    assert not book.learn(sign_record(one, 3, places(one, "51.0.0.3")))


def test_our_own_number_rises_above_what_others_have_seen(identities: list[Identity]) -> None:
    """A clock that was ahead in an earlier life does not hide us."""
    one, _ = identities
    book = AddressBook(one, tuple)
    first = book.own(places(one, "51.0.0.1"), 1000.0)
    assert book.own(places(one, "51.0.0.1"), 1001.0) is first
    assert book.own(places(one, "51.0.0.2"), 1000.0).number > first.number
    book.learn(sign_record(one, 10**12, places(one, "51.0.0.1")))
    assert book.own(places(one, "51.0.0.2"), 1000.0).number == 10**12 + 1


@pytest.mark.parametrize("seed", range(20))
def test_everybody_finds_a_peer_that_moved_by_asking_a_few_others(
    identities: list[Identity], seed: int
) -> None:
    """Each of 60 volunteers knows a few others; a third are liars that give old records, or nothing.

    The moved peer reaches four honest ones. All honest ones have its newest record after six rounds.
    """
    moved, member = identities
    rng = random.Random(seed)
    old, new = (sign_record(moved, n, places(moved, f"51.0.0.{n}")) for n in (1, 2))
    books = [AddressBook(member, lambda: {moved.peer_id}) for _ in range(60)]
    liars = set(rng.sample(range(60), 20))
    honest = [n for n in range(60) if n not in liars]
    knows = {n: set(rng.sample([*range(60)], 10)) for n in honest}
    for book in books:
        book.learn(old)
    for n in rng.sample(honest, 4):
        books[n].learn(new)

    def answer(n: int) -> AddressRecord | None:
        return rng.choice((old, None)) if n in liars else books[n].of(moved.peer_id)

    for _ in range(6):
        for n in honest:
            if books[n].of(moved.peer_id) != new:
                for other in rng.sample(sorted(knows[n]), MEMBERS_ASKED):
                    if (record := answer(other)) is not None:
                        books[n].learn(record)
    assert all(books[n].of(moved.peer_id) == new for n in honest)


def test_an_address_counts_as_left_after_two_looks() -> None:
    line = OwnLine(silence_counts=False)
    seen = [line.left(there) for there in (["a", "b"], ["a"], ["a", "b"], ["a"], ["c"], ["c"])]
    assert seen == [set(), set(), set(), set(), {"b"}, {"a"}]


def test_silence_counts_where_many_call_and_each_time_for_longer() -> None:
    line, quiet = OwnLine(silence_counts=True), OwnLine(silence_counts=False)
    dead = [now for now in range(400) if line.silent(float(now), 10, 1)]
    assert dead[0] == SILENCE_S
    gaps = [after - before for before, after in itertools.pairwise(dead)]
    assert gaps == [min(2 ** (n + 1) * SILENCE_S, LONGEST_S) for n in range(len(gaps))]
    assert not any(quiet.silent(float(now), 10, 1) for now in range(400))
    assert not any(OwnLine(silence_counts=True).silent(float(now), 10, 0) for now in range(400))
    assert not any(OwnLine(silence_counts=True).silent(float(now), now, 3) for now in range(400))
