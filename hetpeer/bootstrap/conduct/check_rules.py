"""Settings of spot checks and proofs of sums (docs/trust.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EQUAL = 1e-9
"""Relative distance of two fingerprints of the same bits, as different processors add float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRules:
    """Settings of spot checks and proofs of sums, from the manifest.

    `draw` returns a number in [0, 1) and `key` the key of a fingerprint; nobody can foresee either.
    """

    share: float = 0.0
    """Share of contributions that are checked, in [0, 1]."""
    tolerance: float = 1e-3
    """Largest relative distance of two honest sums."""
    proves: bool = True
    """Whether sums are proven before they are committed."""
    draw: Callable[[], float]
    key: Callable[[], bytes]
    distance: Callable[[bytes, bytes], float]

    def same(self, one: bytes, other: bytes) -> bool:
        """Whether two fingerprints are of the same numbers, within `tolerance`."""
        return self.distance(one, other) <= self.tolerance

    def equal(self, one: bytes, other: bytes) -> bool:
        """Whether two fingerprints are of the same bits."""
        return self.distance(one, other) <= EQUAL
