"""Changes of bytes that decoders are tried with: of the bytes themselves, and of the values in them, if
they are msgpack or JSON.

A decoder that checks a schema lets nearly nothing through whose bytes were changed blindly; a wrong value in
the right place gets further.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgpack

NUMBERS = [0, -1, 1, 127, 255, 2**16, 2**31, 2**32 - 1, 2**48, 2**53, 2**62, 2**63, 2**64 - 1, -(2**63)]
ODD = [None, True, False, 0.5, -0.0, math.nan, math.inf, -math.inf, 1e300, 5e-324, *NUMBERS]
ODD += [
    "",
    "x",
    "0",
    "1" * 40,
    "é\x1b[2J\n\u2028",
    "\0",
    "../x",
    "a" * 600,
    [],
    {},
    [[]],
    {"": {}},
    [None] * 40,
]
BYTES = [b"", b"\0", b"\xff" * 40, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 1), {1: 2}, {b"x": 1}]
"""What JSON does not have."""
DEEP = (20, 300, 600, 1030, 3000)
"""Containers inside containers."""
TEXT = frozenset(range(0x20, 0x7F))


def mutated(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    """`data` after a few changes; some of it may come from `others`."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        tree = _parsed(data) if random.random() < 0.6 else None
        if tree is None:
            data = random.choice(_RAW)(data, random, others)
        else:
            value, pack = tree
            data = _packed(_changed(value, random, others, pack is _json), pack) or data
    return data


# ── of bytes ────────────────────────────────────────────────────────────────────────────────────────────────


def _flipped(data: bytes, random: Random, _others: Sequence[bytes]) -> bytes:
    if not data:
        return bytes([random.randrange(256)])
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _set(data: bytes, random: Random, _others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    new = random.choice((0, 0x20, 0x2C, 0x7F, 0x80, 0xC0, 0xC1, 0xFF, random.randrange(256)))
    return data[:at] + bytes([new]) + data[at + random.randrange(2) :]


def _cut(data: bytes, random: Random, _others: Sequence[bytes]) -> bytes:
    begin, end = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    return data[:begin] if random.random() < 0.3 else data[:begin] + data[end:]


def _repeated(data: bytes, random: Random, _others: Sequence[bytes]) -> bytes:
    begin = random.randrange(len(data) + 1)
    part = data[begin : begin + random.randrange(1, 17)]
    return data[:begin] + part * random.randrange(1, 9) + data[begin:]


def _spliced(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    other = random.choice(others) if others else data
    here, there = random.randrange(len(data) + 1), random.randrange(len(other) + 1)
    return data[:here] + other[there:]


def _nested(data: bytes, random: Random, _others: Sequence[bytes]) -> bytes:
    """A list in a list, and so on."""
    text = b"[" if set(data) <= TEXT else b"\x91"
    at = random.randrange(len(data) + 1)
    return data[:at] + text * random.choice(DEEP) + data[at + random.randrange(2) :]


_RAW: list[Callable[[bytes, Random, Sequence[bytes]], bytes]] = [
    *[_flipped, _set, _set, _cut, _repeated, _spliced] * 3,
    _nested,
]


# ── of values ───────────────────────────────────────────────────────────────────────────────────────────────


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _parsed(data: bytes) -> tuple[Any, Callable[[Any], bytes]] | None:
    """A map or list, and what writes it again."""
    try:
        if data[:1] in b"{[" and data:
            return json.loads(data), _json
        value = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return None
    return (value, msgpack.packb) if isinstance(value, dict | list) else None


def _packed(value: Any, pack: Callable[[Any], bytes]) -> bytes:
    try:
        return pack(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return b""


def _changed(value: Any, random: Random, others: Sequence[bytes], text: bool) -> Any:
    """A copy in which one value somewhere is another, is gone, or is there twice."""
    if isinstance(value, bytes) and (tree := _parsed(value)) is not None:  # an envelope
        return _packed(_changed(tree[0], random, others, text), tree[1]) or value
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        return _without(value, key, random, others, text)
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        match random.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * random.randrange(2, 6) + value[at + 1 :]
            case _:
                return [*value[:at], _changed(value[at], random, others, text), *value[at + 1 :]]
    if isinstance(value, int) and random.random() < 0.4:
        return value + random.choice((-1, 1, 255, 2**31))
    if isinstance(value, str | bytes) and value and random.random() < 0.4:
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        new = random.choice(_RAW)(raw, random, others)
        return new.decode("utf-8", "replace") if isinstance(value, str) else new
    return random.choice(ODD if text else [*ODD, *BYTES])


def _without(value: dict[Any, Any], key: Any, random: Random, others: Sequence[bytes], text: bool) -> Any:
    rest = {k: v for k, v in value.items() if k != key}
    match random.randrange(12):
        case 0:
            return rest
        case 1:
            name = random.choice(("", "kind", "x" * 600, "\x1b", *([] if text else [0, 2**32, b"x"])))
            return {**rest, name: value[key]}
        case 2:  # what stands elsewhere
            return {**value, key: random.choice(list(value.values()))}
        case _:
            return {k: _changed(v, random, others, text) if k == key else v for k, v in value.items()}
