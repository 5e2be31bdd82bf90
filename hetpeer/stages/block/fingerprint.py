"""Fingerprints of vectors: a few numbers that add up as the vectors do, and cannot be forged without the key.

Element i of a block is multiplied by a sign that the key decides, and added to place i mod `PLACES`: a linear
sketch, whose squared length is the vector's on average, with a relative deviation of sqrt(2 / PLACES) = 9 %
(Alon, Matias, Szegedy 1996; Charikar, Chen, Farach-Colton 2002). Two vectors that differ by d have
fingerprints that differ by about the length of d, unless d was chosen with knowledge of the key
(docs/trust.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

PLACES: Final = 256
"""Numbers in a fingerprint: Philox gives as many bits for one place of its counter."""
NBYTES: Final = PLACES * 8
KEY_BYTES: Final = 16
MUCH: Final = 100
"""Multiple of the usual length from which on a part is huge."""
DROWNS: Final = 1e7
"""Multiple of the usual length from which on a part drowns the others: float32 keeps nothing of them."""
_ROWS = 512
"""Rows of signs generated at once: half a megabyte of float32."""

Fingerprint = NDArray[np.float64]


def fingerprint(vector: NDArray[np.float32], block: int, begin: int, key: bytes) -> Fingerprint:
    """`PLACES` float64 numbers for the elements from `begin` on of the flat vector of `block`.

    Fingerprints of neighbouring pieces add up to that of both. `key` has `KEY_BYTES`.
    """
    total = np.zeros(PLACES)
    row, skip = divmod(begin, PLACES)
    secret = int.from_bytes(key, "little")
    offset = 0
    while offset < len(vector):
        piece = vector[offset : offset + _ROWS * PLACES - skip]
        rows = -(-(skip + len(piece)) // PLACES)
        bits = np.random.Philox(key=secret, counter=[row, block, 0, 0]).random_raw(4 * rows)
        signs = np.unpackbits(bits.astype("<u8").view(np.uint8), bitorder="little").astype(np.uint32) << 31
        own = signs[skip : skip + len(piece)]
        own ^= np.ascontiguousarray(piece).view(np.uint32)  # the sign bit of a float32
        signs[:skip] = signs[skip + len(piece) :] = 0
        total += signs.view(np.float32).reshape(rows, PLACES).sum(axis=0, dtype=np.float64)
        offset, row, skip = offset + len(piece), row + rows, 0
    return total


def pack(marks: Fingerprint) -> bytes:
    """The numbers as little-endian float64."""
    return marks.astype("<f8").tobytes()


def unpack(data: bytes) -> Fingerprint:
    """The numbers in `NBYTES` bytes."""
    return np.frombuffer(data, "<f8").astype(np.float64)


def is_fingerprint(data: bytes) -> bool:
    """Whether the bytes are a fingerprint of finite numbers."""
    return len(data) == NBYTES and bool(np.isfinite(unpack(data)).all())


class ExpectedSum:
    """The expected sum of some vectors, from their fingerprints: `parts`, by sender.

    Parts longer than `MUCH` times the usual are `huge`, and count as no longer than that: two that claim to
    be huge and opposite would hide everything. A part in `drowning` leaves nothing of the others.
    """

    def __init__(self, parts: Mapping[str, bytes]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            vectors = {peer: unpack(part) for peer, part in parts.items()}
            self._total = sum(vectors.values(), np.zeros(PLACES))
            lengths = {peer: float(np.linalg.norm(one)) for peer, one in vectors.items()}
        usual = median([length for length in lengths.values() if length] or [0.0])
        most = MUCH * usual
        self.drowning = {peer for peer, length in lengths.items() if length > DROWNS * usual}
        self.huge = {peer for peer, length in lengths.items() if length > most}
        self._capped = sum(min(length, most) for length in lengths.values())
        self._length = sum(lengths.values())

    def is_near(self, total: bytes, within: float, *, capped: bool = True) -> bool:
        """Whether a vector with fingerprint `total` is that sum, up to `within` times the lengths of its
        parts.

        False if the parts are too large to add.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            apart = float(np.linalg.norm(self._total - unpack(total)))
        return math.isfinite(apart) and apart <= within * (self._capped if capped else self._length)


def difference(one: bytes, other: bytes) -> float:
    """‖F(one) - F(other)‖, about the length of the vectors' difference; infinite for invalid ones."""
    if not (is_fingerprint(one) and is_fingerprint(other)):
        return math.inf
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(unpack(one) - unpack(other)))


def distance(one: bytes, other: bytes) -> float:
    """‖F(one) - F(other)‖ / ‖F(one)‖, about the vectors' relative distance; infinite for invalid ones."""
    apart = difference(one, other)
    if not apart or math.isinf(apart):
        return apart
    length = float(np.linalg.norm(unpack(one)))
    return apart / length if length else math.inf
