"""The layout of one frame on a stream (docs/links.md).

    offset 0   2 bytes  magic "hp"
           2   u8       version of this layout
           3   u8       reserved, zero
           4   u32      header length in bytes, at most MAX_HEADER
           8   u64      payload length in bytes
          16   header   msgpack map with string keys
               payload  raw

All integers are little-endian. Sizes are checked before anything is allocated, and the decoders raise
`ProtocolError` and nothing else, whatever the bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import decode_map

MAGIC = b"hp"
VERSION = 1
PREFIX = struct.Struct("<2sBBIQ")
MAX_HEADER = 64 * 1024
"""Bytes of one header."""
DEFAULT_PAYLOAD_LIMIT = 1 << 30
"""Bytes of one payload if the receiver names no limit of its own."""


def encode_head(header: Mapping[str, Any], payload_length: int) -> bytes:
    """Prefix and header of one frame. Raises ValueError or TypeError if it could not be decoded again."""
    packed: bytes = msgpack.packb(dict(header), use_bin_type=True)
    if len(packed) > MAX_HEADER:
        raise ValueError(f"header of {len(packed)} bytes; the limit is {MAX_HEADER}")
    return PREFIX.pack(MAGIC, VERSION, 0, len(packed), payload_length) + packed


def decode_prefix(
    data: bytes, *, payload_limit: int = DEFAULT_PAYLOAD_LIMIT, header_limit: int = MAX_HEADER
) -> tuple[int, int]:
    """(header length, payload length) from a frame's first 16 bytes. Raises `ProtocolError`."""
    if len(data) != PREFIX.size:
        raise ProtocolError(f"a frame prefix of {len(data)} bytes")
    magic, version, reserved, header_length, payload_length = PREFIX.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("a stream that does not carry hetpeer frames")
    if version != VERSION or reserved != 0:
        raise ProtocolError(f"frame version {version}.{reserved}; this peer speaks {VERSION}.0")
    if not 0 < header_length <= header_limit:
        raise ProtocolError(f"a header of {header_length} bytes; the limit is {header_limit}")
    if payload_length > payload_limit:
        raise ProtocolError(f"a payload of {payload_length} bytes; the limit here is {payload_limit}")
    return header_length, payload_length


def decode_header(data: bytes) -> dict[str, Any]:
    """The header: a map with string keys, of None, bool, int, float, str, bytes, lists and such maps."""
    return decode_map(data, limit=MAX_HEADER)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHead:
    """The head of a received frame; its payload is still to be taken from the stream."""

    header: dict[str, Any]
    payload_length: int
