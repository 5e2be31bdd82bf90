"""Msgpack from others. This is the place that knows all that the library raises for bytes that are none."""

from __future__ import annotations

from typing import Any

import msgpack

from hetpeer.dht.errors import ProtocolError


def unpack(data: bytes | bytearray, what: str, peer: str = "", **options: Any) -> Any:
    """The one value in `data`; `options` are msgpack's. Raises `ProtocolError`: these bytes, of `peer`, are not `what`."""
    try:
        return msgpack.unpackb(data, **options)
    except (
        ValueError,
        TypeError,
        RecursionError,
        msgpack.UnpackException,
    ) as error:  # TypeError: a map as a key
        raise ProtocolError(f"bytes that are not {what}", peer=peer, why=type(error).__name__) from error
