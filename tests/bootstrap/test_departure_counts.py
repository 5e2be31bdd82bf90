"""How often peers have left, as reliable peers tell it."""

from collections import Counter

import msgpack
import pytest

from hetpeer.bootstrap.log.departure_counts import MAX_BYTES, MOST, decode, encode
from hetpeer.bootstrap.log.history import History
from hetpeer.dht.base.errors import ProtocolError

ADA = "Qm" + "a" * 44


def peer(number):
    return f"Qm{number:044}".replace("0", "A")


def test_departures_are_those_of_the_log():
    records = [{"kind": "gone", "peer": ADA, "why": "lease expired"}] * 3
    found = decode(encode(History.of(records).departures), "boss")
    assert (found.of(ADA), found.of(peer(1))) == (3, 0)


def test_of_very_many_those_that_left_most_often_are_told():
    many = Counter({peer(number): 1 + (number < 5) for number in range(MOST + 100)})
    data = encode(many)
    assert len(data) <= MAX_BYTES
    found = decode(data, "boss")
    assert [found.of(peer(number)) for number in (0, 4)] == [2, 2]
    assert found.of("Qm" + "z" * 44) is None


@pytest.mark.parametrize(
    "told",
    [
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb({"peers": {}}),
        msgpack.packb({"peers": {ADA: -1}, "complete": True}),
        msgpack.packb({"peers": {"<b>": 1}, "complete": True}),
        msgpack.packb({"peers": {peer(number): 1 for number in range(MOST + 1)}, "complete": True}),
    ],
)
def test_what_is_no_count_is_refused(told):
    with pytest.raises(ProtocolError):
        decode(told, "mallory")
