"""The windows of the codec `topk2` as bytes (sparse_movement.py).

A window's sizes are means of the kept elements that are not above their mean, and of those that are. The
positions are an Elias-Fano code: the lower bits as they are, the upper ones in unary. Every operation is an
integer one or a single IEEE one in a fixed order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.stages.links.sparse_movement import KEPT, PLACES, WINDOW, WINDOW_BYTES

LOWER: Final = 6
"""Bits of a position that are written as they are."""
UPPER: Final = KEPT + (WINDOW >> LOWER)
"""Bits in unary: a 1 for each element, and a 0 for each value of the upper bits."""
AT_ONCE: Final = 64
"""Windows encoded at a time: their keys take 2 MiB."""
INFINITE: Final = 0x7F800000
"""Magnitudes of float32 values that are not finite, from here on, as integers."""

RECORD: Final = np.dtype(
    [
        ("sizes", "<f4", 2),
        ("upper", "u1", UPPER // 8),
        ("lower", "u1", KEPT * LOWER // 8),
        ("negative", "u1", KEPT // 8),
        ("large", "u1", KEPT // 8),
    ]
)
assert RECORD.itemsize == WINDOW_BYTES

Array = np.ndarray[Any, Any]


def write_windows(flat: Array, target: memoryview) -> None:
    """Encode float32 values. Raises LocalError HP-NUM-002 if one is not finite."""
    records = np.frombuffer(target, RECORD)
    for first in range(0, len(records), AT_ONCE):
        piece = flat[first * WINDOW : (first + AT_ONCE) * WINDOW]
        windows = np.zeros((-(-len(piece) // WINDOW), WINDOW), np.float32)
        windows.reshape(-1)[: len(piece)] = piece
        _write(windows, records[first : first + len(windows)])


def read_windows(data: memoryview, count: int) -> Array:
    """`count` float32 values. Raises ProtocolError for bytes that `write_windows` does not write."""
    found = np.zeros(count, np.float32)
    records = np.frombuffer(data, RECORD)
    for first in range(0, len(records), AT_ONCE):
        _read(records[first : first + AT_ONCE], found[first * WINDOW : (first + AT_ONCE) * WINDOW])
    return found


def _write(windows: Array, records: Array) -> None:
    positions, kept = _largest(windows)
    values = np.take_along_axis(windows, np.minimum(positions, WINDOW - 1), axis=1)
    magnitudes = np.where(kept, np.abs(values), 0.0).astype(np.float64)
    large = magnitudes > _mean(magnitudes, kept)[:, np.newaxis]
    sizes = [_mean(np.where(these, magnitudes, 0.0), these) for these in (kept & ~large, large)]
    records["sizes"] = np.stack(sizes, axis=1).astype(np.float32)
    unary = np.zeros((len(windows), UPPER), bool)
    rows, places = np.nonzero(kept)
    unary[rows, (positions[rows, places] >> LOWER) + places] = True
    bits = (positions[:, :, np.newaxis] >> np.arange(LOWER - 1, -1, -1)) & kept[:, :, np.newaxis]
    records["upper"] = np.packbits(unary, axis=1)
    records["lower"] = np.packbits(bits.reshape(len(windows), -1), axis=1)
    records["negative"] = np.packbits((values < 0) & kept, axis=1)
    records["large"] = np.packbits(large, axis=1)


def _largest(windows: Array) -> tuple[Array, Array]:
    """Positions (windows, KEPT), rising, and which of them are of elements to keep, the first ones.

    A key is a magnitude, whose bits rise with it, and then how early it comes: no two are equal.
    Raises LocalError HP-NUM-002 for a value that is not finite.
    """
    magnitudes = (windows.view(np.int32) & 0x7FFFFFFF).astype(np.int64)
    if magnitudes.max() >= INFINITE:
        raise LocalError(
            "HP-NUM-002",
            "a movement of parameters is not finite",
            why="no codec writes such a number",
            fix="use a smaller learning rate",
        )
    keys = magnitudes << PLACES | (WINDOW - 1 - np.arange(WINDOW))
    best = np.partition(keys, WINDOW - KEPT, axis=1)[:, WINDOW - KEPT :]
    zero = best < WINDOW
    positions = np.sort(np.where(zero, WINDOW, WINDOW - 1 - (best & (WINDOW - 1))), axis=1)
    return positions, positions < WINDOW


def _mean(numbers: Array, counted: Array) -> Array:
    """Mean of each row, added up in the order of positions; `numbers` that are not `counted` are 0."""
    total = np.zeros(len(numbers))
    for place in range(KEPT):
        total += numbers[:, place]
    mean: Array = total / np.maximum(np.count_nonzero(counted, axis=1), 1)
    return mean


def _read(records: Array, into: Array) -> None:
    """Write the kept elements to their places. Raises ProtocolError for what `_write` does not write."""
    unary = np.unpackbits(records["upper"], axis=1)
    counts = unary.sum(axis=1, dtype=np.int64)
    if counts.max() > KEPT:
        raise ProtocolError(f"{counts.max()} elements of a window that keeps {KEPT}")
    rows, columns = np.nonzero(unary)
    ranks = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    bits = np.unpackbits(records["lower"], axis=1).reshape(len(records), KEPT, LOWER).astype(np.int64)
    lower = bits @ (1 << np.arange(LOWER - 1, -1, -1))
    within = ((columns - ranks) << LOWER) + lower[rows, ranks]
    places = rows * WINDOW + within
    if (within >= WINDOW).any() or (np.diff(places) <= 0).any() or (places >= len(into)).any():
        raise ProtocolError("positions that do not rise, or are beyond the end of what is sent")
    sizes = records["sizes"]
    if not (np.isfinite(sizes).all() and (sizes >= 0).all()):
        raise ProtocolError("a size that is negative or not finite")
    large, negative = (
        np.unpackbits(records[name], axis=1)[rows, ranks].astype(np.int64) for name in ("large", "negative")
    )
    into[places] = sizes[rows, large] * (1 - 2 * negative).astype(np.float32)
