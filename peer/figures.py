"""What a volunteer offers, and what it did so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What this machine brings."""

    memory_bytes: int
    flops_per_second: float
    name: str = ""


@dataclass(slots=True)
class Figures:
    """For the volunteer's own progress line and its advert."""

    microbatches: int = 0
    """Block ranges run forward and backward here."""
    steps: int = 0
    tokens_per_second: float = 0.0
