"""What a volunteer offers, and what it did so far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from hetpeer.stages.execution.occupation import Shares

RECENT = 9
"""Steps of which the middle one says how long it is from one to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What this machine brings."""

    memory_bytes: int
    flops_per_second: float
    disk_bytes: int = 0
    """For tensors that must be kept and do not fit into memory."""
    name: str = ""


@dataclass(slots=True)
class Figures:
    """For the volunteer's own progress line and its advert."""

    microbatches: int = 0
    """Block ranges run forward and backward here."""
    steps: int = 0
    tokens_per_second: float = 0.0
    shares: Shares = field(default_factory=Shares)
    """What its worker does, and waits for."""
    _worked_at: float | None = None
    _pauses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def worked(self, now: float) -> None:
        """A microbatch has been run forward and backward, `now` in seconds."""
        self.microbatches += 1
        self._worked_at = now

    def begun(self, now: float) -> None:
        """A step begins."""
        if self._worked_at is not None:
            self._pauses.append(now - self._worked_at)
            self._worked_at = None

    @property
    def between_s(self) -> float:
        """Seconds between the last work of a step here and the beginning of the next; 0: not known."""
        return median(self._pauses) if self._pauses else 0.0
