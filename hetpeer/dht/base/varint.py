"""The part of protobuf that we write and read ourselves: variable-length integers and flat messages."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """`value` ≥ 0 in groups of seven bits, lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(integer at offset `at`, offset after it). Raises ValueError for an integer that does not end or is too
    long.
    """
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
    """Field number → integer or bytes, of a message without fixed-width numbers; a repeated field keeps its
    last value.

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
