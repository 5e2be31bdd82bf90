"""Rising positions as bytes: gaps, or a bit for each element, whichever is shorter.

A gap is the distance to the position before, less one, in a byte; 255 means "255 more" and continues. zstd
compresses regular gaps: at one element in ten it saves a third, close to the entropy of random positions.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.links.codec import bitmap_bytes
from hetpeer.stages.links.squeezing import inflated, squeezed

GO_ON = 255

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]


class PositionForm(enum.IntEnum):
    """Encodings of positions."""

    GAPS = 0
    SQUEEZED_GAPS = 1
    BITMAP = 2


def encode_positions(positions: Positions, count: int, *, squeeze: bool) -> tuple[PositionForm, bytes]:
    """The shortest form of rising positions below `count`; `squeeze`: try zstd, which takes time."""
    gaps = _gaps(positions)
    form, data = PositionForm.GAPS, gaps
    if squeeze:
        shorter = squeezed(gaps)
        if len(shorter) < len(data):
            form, data = PositionForm.SQUEEZED_GAPS, shorter
    if bitmap_bytes(count) <= len(data):
        bits = np.zeros(count, np.uint8)
        bits[positions] = 1
        form, data = PositionForm.BITMAP, np.packbits(bits).tobytes()
    return form, data


def decode_positions(form: int, data: Any, kept: int, count: int) -> Positions:
    """`kept` rising positions below `count` (both bound the memory). Raises ProtocolError for all else."""
    match form:
        case PositionForm.GAPS:
            positions = _from_gaps(data)
        case PositionForm.SQUEEZED_GAPS:
            positions = _from_gaps(inflated(data, kept + count // GO_ON))
        case PositionForm.BITMAP:
            positions = _from_bitmap(data, count)
        case _:
            raise ProtocolError(f"positions of the unknown form {form}")
    if len(positions) != kept or (kept and positions[-1] >= count):
        raise ProtocolError(f"positions that are not {kept} of {count}")
    return positions


def _gaps(positions: Positions) -> bytes:
    distances = np.diff(positions, prepend=-1) - 1
    longs, rest = np.divmod(distances, GO_ON) if distances.max(initial=0) >= GO_ON else (None, distances)
    if longs is None:
        return rest.astype(np.uint8).tobytes()
    ends = np.cumsum(longs + 1) - 1
    written = np.full(int(ends[-1]) + 1, GO_ON, np.uint8)
    written[ends] = rest
    return written.tobytes()


def _from_gaps(data: Any) -> Positions:
    """A position is the sum of all gaps up to it, plus the number of positions before it."""
    gaps = np.frombuffer(data, np.uint8)
    if len(gaps) and gaps[-1] == GO_ON:
        raise ProtocolError("positions that end in the middle of a gap")
    counted = np.cumsum(gaps, dtype=np.int64)
    ends = gaps != GO_ON
    if not ends.all():
        counted = counted[ends]
    return counted + np.arange(len(counted))


def _from_bitmap(data: Any, count: int) -> Positions:
    if len(data) != bitmap_bytes(count):
        raise ProtocolError(f"a bitmap of {len(data)} bytes for {count} elements")
    found: Positions = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8)))
    return found
