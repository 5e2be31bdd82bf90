"""Canonical msgpack for values that are hashed or signed: sorted keys, so equal values have equal bytes."""

from __future__ import annotations

from typing import Any

import msgpack


def pack(value: Any) -> bytes:
    """The value as msgpack, map keys sorted at every level. Map keys must be strings."""
    data: bytes = msgpack.packb(_sorted(value))
    return data


def unpack(data: bytes) -> Any:
    """The value of one msgpack message. Raises ValueError, and nothing else, on anything malformed."""
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except (msgpack.UnpackException, ValueError) as error:
        raise ValueError(f"not msgpack: {error}") from error


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value
