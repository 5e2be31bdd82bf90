from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import MAX_DEPTH
from hetpeer.dht.streams.frame import MAX_HEADER, PREFIX, decode_header, decode_prefix, encode_head

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
headers = st.dictionaries(st.text(max_size=8), values, max_size=6)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@given(header=headers, payload_length=st.integers(0, 2**30))
def test_what_is_encoded_is_decoded(header: dict[str, Any], payload_length: int) -> None:
    head = encode_head(header, payload_length)
    assert decode_prefix(head[: PREFIX.size]) == (len(head) - PREFIX.size, payload_length)
    assert decode_header(head[PREFIX.size :]) == header


prefixes = st.binary(max_size=40) | st.builds(
    PREFIX.pack,
    st.sampled_from([b"hp", b"ph"]),
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 2**32 - 1) | st.integers(0, 100),
    st.integers(0, 2**64 - 1),
)


@given(prefixes)
def test_no_bytes_make_the_prefix_decoder_raise_anything_else(data: bytes) -> None:
    try:
        header_length, payload_length = decode_prefix(data, payload_limit=2**62)
    except ProtocolError:
        return
    assert data == PREFIX.pack(b"hp", 1, 0, header_length, payload_length)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The msgpack of a good header with a few bytes put in or replaced."""
    good: bytes = msgpack.packb(draw(headers))
    cut = draw(st.integers(0, len(good)))
    return good[:cut] + draw(st.binary(max_size=3)) + good[cut + draw(st.integers(0, 2)) :]


@given(st.binary(max_size=200) | damaged())
def test_no_bytes_make_the_header_decoder_raise_anything_else(data: bytes) -> None:
    try:
        header = decode_header(data)
    except ProtocolError:
        return
    assert msgpack.packb(decode_header(msgpack.packb(header))) == msgpack.packb(header)


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb([1]),
        msgpack.packb({1: 1}),
        msgpack.packb({b"a": 1}),
        msgpack.packb({"a": msgpack.ExtType(4, b"x")}),
        msgpack.packb({"a": msgpack.Timestamp(1)}),
        msgpack.packb({"a": 1}) + b"\0",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\x81\xa1a" + b"\x91" * 3000 + b"\0",
        b"\x81\xa1\xff\x01",  # a key that is not UTF-8
        msgpack.packb(nested(MAX_DEPTH + 1)),
        msgpack.packb({"a": bytes(MAX_HEADER)}),
    ],
)
def test_a_header_outside_the_schema_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(data)


def test_the_deepest_header_allowed_is_accepted() -> None:
    assert decode_header(msgpack.packb(nested(MAX_DEPTH))) == nested(MAX_DEPTH)


@pytest.mark.parametrize(
    "prefix",
    [
        PREFIX.pack(b"hq", 1, 0, 1, 0),
        PREFIX.pack(b"hp", 2, 0, 1, 0),
        PREFIX.pack(b"hp", 1, 1, 1, 0),
        PREFIX.pack(b"hp", 1, 0, 0, 0),
        PREFIX.pack(b"hp", 1, 0, MAX_HEADER + 1, 0),
        PREFIX.pack(b"hp", 1, 0, 1, 101),
        PREFIX.pack(b"hp", 1, 0, 1, 2**64 - 1),
    ],
)
def test_a_prefix_outside_the_limits_is_refused(prefix: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_prefix(prefix, payload_limit=100)


def test_a_header_that_no_receiver_would_take_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="limit"):
        encode_head({"a": bytes(MAX_HEADER)}, 0)
