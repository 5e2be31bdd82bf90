"""Decoding bytes from peers: msgpack, pydantic fields and flat protobuf. Pure.

Sizes are checked before anything is allocated. Every error of the libraries becomes a `ProtocolError`, except
in the protobuf readers, which raise ValueError.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NoReturn

import msgpack
from pydantic import BeforeValidator, Field, ValidationError

from hetpeer.dht.base.errors import ProtocolError

MAX_DEPTH = 16
"""Containers inside containers in one map."""
MAX_NAME = 32
"""Characters of a name that a peer chooses."""
SHOWN = 1000
"""Most validation errors that are looked at, else none: pydantic builds an object of about 1 kB for each."""
_OF_A_UNION = re.compile(r"(constrained|function)-.*|literal\[.*\]")
"""Part of a path that names no field: pydantic adds which type of a union a value is not."""


def first_wrong(error: ValidationError) -> tuple[str, str]:
    """(path, message) of the first wrong field; ("", how many) if there are more than SHOWN."""
    count = error.error_count()
    if count > SHOWN:
        return "", f"{count} fields are wrong"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    while path and _OF_A_UNION.fullmatch(path[-1]):
        path.pop()
    return ".".join(path), plain_reason(first["msg"])


def plain_reason(message: str) -> str:
    """A validator's `message` in plain words."""
    if message == "Extra inputs are not permitted":
        return "nothing of that name is known here"
    text = message.removeprefix("Value error, ").partition(", unable to parse")[0]
    return re.sub(r"\b[A-Z][a-z]+ should ", "it must ", text)


def unpack(data: bytes | bytearray, what: str, peer: str = "", **options: Any) -> Any:
    """Unpack the single value in `data`, with msgpack's `options`. Raises `ProtocolError` with `what`."""
    try:
        return msgpack.unpackb(data, **options)
    # TypeError: a map as a key
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"bytes that are not {what}", peer=peer, why=type(error).__name__) from error


def peek(data: bytes | bytearray, key: str, what: str) -> Any:
    """The value under `key` of the map in `data`, or None; nothing else is built. `what`: as for `unpack`.

    Raises `ProtocolError` if `data` is no map as far as it is read.
    """
    reader = msgpack.Unpacker(max_buffer_size=len(data), strict_map_key=True, max_ext_len=0)
    try:
        reader.feed(data)
        for _ in range(reader.read_map_header()):
            if reader.unpack() == key:
                return reader.unpack()
            reader.skip()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"bytes that are not {what}", why=type(error).__name__) from error
    return None


def decode_map(data: bytes, *, limit: int) -> dict[str, Any]:
    """A strict msgpack map of at most `limit` bytes (a frame header, a record). Raises `ProtocolError`."""
    if len(data) > limit:
        raise ProtocolError(f"{len(data)} bytes of msgpack; the limit is {limit}")
    value = unpack(data, "msgpack", raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    if not isinstance(value, dict):
        raise ProtocolError("msgpack that is not a map")
    _check_tree(value)
    return value


def _check_tree(root: dict[str, Any]) -> None:
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


def printable(text: object) -> object:
    """`text` as printable ASCII without markup characters, at most MAX_NAME long; other types unchanged."""
    if not isinstance(text, str):
        return text
    return "".join(c for c in text if " " <= c <= "~" and c not in "<>&\"'`\\")[:MAX_NAME]


Label = Annotated[str, BeforeValidator(printable)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""Bounded, so that sums over a swarm stay finite whatever its peers claim."""
Share = Annotated[float, Field(ge=0, le=1)]


def varint(value: int) -> bytes:
    """`value` ≥ 0 in groups of seven bits, lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(integer at offset `at`, offset after it). Raises ValueError for an endless or too long integer."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("an integer that does not end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise ValueError("an integer of more than 64 bits")


def read_fields(message: bytes) -> dict[int, int | bytes]:
    """Field number → integer or bytes, of a message without fixed-width numbers; of repeated fields the last.

    Raises ValueError for bytes that are no such message.
    """
    found: dict[int, int | bytes] = {}
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        value, at = read_varint(message, at)
        match key & 7:
            case 0:
                found[key >> 3] = value
            case 2 if value <= len(message) - at:
                found[key >> 3] = message[at : at + value]
                at += value
            case _:
                raise ValueError("a field of an unknown kind, or one that does not end")
    return found
