"""Msgpack from others, and what pydantic says of it. This is the place that knows all that the libraries raise for bytes that are none."""

from __future__ import annotations

from typing import Any

import msgpack
from pydantic import ValidationError

from hetpeer.dht.base.errors import ProtocolError

SHOWN = 1000
"""Of more errors none is looked at: pydantic makes an object of each first, a kilobyte or so."""


def first_wrong(error: ValidationError) -> tuple[str, str]:
    """The first field that is wrong, by its path, and what is wrong with it; of very many none by name."""
    count = error.error_count()
    if count > SHOWN:
        return "", f"{count} fields are wrong"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


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
