"""What relays answer, byte by byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ProtocolError, RemoteError
from hetpeer.dht.base.untrusted import read_fields, read_varint, varint
from hetpeer.dht.reach.relay_slots import RelayReservation, reservation_in


@pytest.mark.parametrize(
    "answer", [b"", b"\x08\x02", b"\xff" * 20, b"\x28\xc8\x01", b"\x28\x64", b"\x28\x64\x1a\x7f"]
)
def test_an_answer_that_grants_nothing_is_an_error(answer: bytes) -> None:
    with pytest.raises((RemoteError, ProtocolError)):
        reservation_in(answer, "Qm")


def test_a_relay_that_refuses_says_why() -> None:
    with pytest.raises(RemoteError) as caught:
        reservation_in(b"\x28\xc8\x01", "Qm")
    assert caught.value.line().startswith("HP-NET-013: a relay gave no slot; why: ")


def test_no_limits_are_the_best() -> None:
    assert reservation_in(b"\x08\x02\x28\x64\x1a\x02\x08\x07", "Qm") == RelayReservation(
        expires=7, max_bytes=0, max_seconds=0
    )
    assert reservation_in(b"\x28\x64\x1a\x02\x08\x07", "Qm").useful


@given(st.binary(max_size=64))
def test_no_bytes_are_more_than_an_error(junk: bytes) -> None:
    try:
        reservation_in(junk, "Qm")
    except RemoteError:
        return
    assert read_fields(junk)[5] == 100


@given(st.integers(0, 2**63))
def test_integers_come_back(number: int) -> None:
    data = varint(number)
    assert read_varint(data, 0) == (number, len(data))
