"""Scalars on which peers must agree to the bit: powers and float32 constants. No torch."""

from __future__ import annotations

import ctypes


def power(base: float, exponent: int) -> float:
    """`base ** exponent` by squaring, which gives equal bits everywhere, unlike the C library's pow."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def float32(value: float) -> float:
    """The nearest float32 as a Python float, which torch passes on without rounding again."""
    return ctypes.c_float(value).value
