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


def committed(step, seconds, newcomers=()):
    return {"kind": "commit", "step": step, "seconds": seconds, "newcomers": newcomers}


def test_departures_are_expected_as_they_were_and_newcomers_are_like_the_others():
    """Ada leaves four times in two hours, Bob never, and Cy comes at the end of them."""
    ada, bob, cy = (peer(number) for number in range(3))
    gone = {"kind": "gone", "peer": ada, "why": "lease expired"}
    first = committed(0, 1800.0, [ada, bob])
    records = [first, *[gone] * 4, *(committed(step, 1800.0) for step in (1, 2))]
    assert not decode(encode(History.of(records[:5])), "boss").hourly  # half an hour says nothing
    history = History.of([*records, committed(3, 1800.0), committed(4, 0.0, [cy])])
    found = decode(encode(history), "boss").hourly
    usual = 4 / (2 * 2.0)
    assert found == pytest.approx({ada: 5 / (2 + 1 / usual), bob: 1 / (2 + 1 / usual), cy: usual})


def test_departures_are_those_of_the_log():
    records = [{"kind": "gone", "peer": ADA, "why": "lease expired"}] * 3
    found = decode(encode(History.of(records)), "boss")
    assert not found.hourly
    assert (found.of(ADA), found.of(peer(1))) == (3, 0)


def test_of_very_many_those_that_left_most_often_are_told():
    many = Counter({peer(number): 1 + (number < 5) for number in range(MOST + 100)})
    gone = [{"kind": "gone", "peer": name, "why": "lease expired"} for name in many.elements()]
    data = encode(History.of([*gone, committed(0, 7200.0)]))
    assert len(data) <= MAX_BYTES
    found = decode(data, "boss")
    assert len(found.hourly) == MOST
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
