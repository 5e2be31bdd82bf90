"""Decoding msgpack from peers: every error of the libraries becomes a `ProtocolError`."""

from __future__ import annotations

from typing import Any

import msgpack
from pydantic import ValidationError

from hetpeer.dht.base.errors import ProtocolError

SHOWN = 1000
"""With more errors than this none is looked at: pydantic would build an object of about 1 kB for each."""


def first_wrong(error: ValidationError) -> tuple[str, str]:
    """(path, message) of the first wrong field; ("", how many) if there are more than SHOWN."""
    count = error.error_count()
    if count > SHOWN:
        return "", f"{count} fields are wrong"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


def unpack(data: bytes | bytearray, what: str, peer: str = "", **options: Any) -> Any:
    """The one value in `data`; `options` go to msgpack. Raises `ProtocolError` with "bytes that are not
    `what`".
    """
    try:
        return msgpack.unpackb(data, **options)
    except (
        ValueError,
        TypeError,
        RecursionError,
        msgpack.UnpackException,
    ) as error:  # TypeError: a map as a key
        raise ProtocolError(f"bytes that are not {what}", peer=peer, why=type(error).__name__) from error
