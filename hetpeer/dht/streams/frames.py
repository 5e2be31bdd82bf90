"""The frame: how a header and raw bytes travel on a stream. Pure; no I/O.

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
from typing import Any, NoReturn

import msgpack

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack

MAGIC = b"hp"
VERSION = 1
PREFIX = struct.Struct("<2sBBIQ")
MAX_HEADER = 64 * 1024
"""Bytes of one header."""
MAX_DEPTH = 16
"""Containers inside containers in one header."""
DEFAULT_PAYLOAD_LIMIT = 1 << 30
"""Bytes of one payload if the receiver names no limit of its own."""

Header = dict[str, Any]


def encode_head(header: Mapping[str, Any], payload_length: int) -> bytes:
    """Prefix and header of one frame.

    Raises ValueError or TypeError for a header that could not be decoded again.
    """
    packed: bytes = msgpack.packb(dict(header), use_bin_type=True)
    if len(packed) > MAX_HEADER:
        raise ValueError(f"header of {len(packed)} bytes; the limit is {MAX_HEADER}")
    return PREFIX.pack(MAGIC, VERSION, 0, len(packed), payload_length) + packed


def decode_prefix(data: bytes, *, payload_limit: int = DEFAULT_PAYLOAD_LIMIT) -> tuple[int, int]:
    """(header length, payload length) of the frame that begins with these 16 bytes. Raises
    `ProtocolError`.
    """
    if len(data) != PREFIX.size:
        raise ProtocolError(f"a frame prefix of {len(data)} bytes")
    magic, version, reserved, header_length, payload_length = PREFIX.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("a stream that does not carry hetpeer frames")
    if version != VERSION or reserved != 0:
        raise ProtocolError(f"frame version {version}.{reserved}; this peer speaks {VERSION}.0")
    if not 0 < header_length <= MAX_HEADER:
        raise ProtocolError(f"a header of {header_length} bytes; the limit is {MAX_HEADER}")
    if payload_length > payload_limit:
        raise ProtocolError(f"a payload of {payload_length} bytes; the limit here is {payload_limit}")
    return header_length, payload_length


def decode_header(data: bytes) -> Header:
    """The header: a map with string keys, of None, bool, int, float, str, bytes, lists and such maps."""
    return decode_map(data, limit=MAX_HEADER)


def decode_map(data: bytes, *, limit: int) -> Header:
    """A strict msgpack map of at most `limit` bytes, as in a frame header; also used for records.

    Raises `ProtocolError`.
    """
    if len(data) > limit:
        raise ProtocolError(f"{len(data)} bytes of msgpack; the limit is {limit}")
    value = unpack(data, "msgpack", raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    if not isinstance(value, dict):
        raise ProtocolError("msgpack that is not a map")
    _check_tree(value)
    return value


def _check_tree(root: Header) -> None:
    """Check all values level by level, without recursion; the byte limit bounds the number of items."""
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                if not all(isinstance(key, str) for key in container):
                    raise ProtocolError("a map whose keys are not text")
                items = container.values()
            else:
                items = container
            for item in items:
                if isinstance(item, dict | list):
                    below.append(item)
                elif not isinstance(item, str | bytes | int | float | None):
                    raise ProtocolError(f"a value of type {type(item).__name__}")
        if not below:
            return
        level = below
    raise ProtocolError(f"msgpack nested deeper than {MAX_DEPTH}")


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")
