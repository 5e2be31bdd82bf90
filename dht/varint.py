"""Protobuf's variable-length integers, the one piece of that format we write ourselves."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """`value` ≥ 0 in groups of seven bits, lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
