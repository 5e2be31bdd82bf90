"""Bytes that are no message about the log raise ProtocolError, even if they are hardly msgpack."""

import msgpack
import pytest

from hetpeer.bootstrap.consensus.raft_messages import TakeOver, decode, encode
from hetpeer.dht.base.errors import ProtocolError


def test_a_message_arrives() -> None:
    assert decode(encode(TakeOver(term=3))) == TakeOver(term=3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",  # no format: an error without a text
        b"\x91" * 2000,  # too deep for msgpack
        b"\x81\x91\x01\x01",  # a list as a key
        b"\x81\x81\x01\x01\x01",
        encode(TakeOver(term=3))[:-1],
        encode(TakeOver(term=3)) + b"\0",
        msgpack.packb({"kind": "take_over"}),
        msgpack.packb(["take_over"]),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)
