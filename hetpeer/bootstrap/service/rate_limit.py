"""How much of one peer a coordinator listens to: beyond it nothing is refused, what the peer says only waits, and nobody else does.

Pure. A new session of a known volunteer is a departure in the log, on the disks of most reliable peers, and other people's work is done again
for it: those are few. Messages and bytes are what a loop and a parser can take of each. Docs: SECURITY.md.
"""

from __future__ import annotations

SESSIONS = (0.2, 10.0)
"""A second, and at once after a pause. A volunteer begins one when the coordinator has forgotten it, or has turned it out."""
MESSAGES = (1000.0, 4000.0)
"""An honest one has about one for each slot, block and 2 MiB of a reduce: eleven a step, and ten a second, in the swarm of two of tests/hostile."""
BYTES = (8e6, 64e6)
"""The longest are evidence for a new coordinator, a line of 1 to 10 kB for each block of each step, and fingerprints, 4 KiB for each block."""


class _Tokens:
    def __init__(self, rate: float, most: float, now: float) -> None:
        self._rate, self._most = rate, most
        self._left, self._at = most, now

    def _fill(self, now: float) -> None:
        self._left = min(self._left + max(now - self._at, 0.0) * self._rate, self._most)
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until something may be taken."""
        self._fill(now)
        return max(0.0, 1.0 - self._left) / self._rate

    def take(self, amount: float) -> None:
        self._left -= amount

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self._left >= self._most


class RateLimit:
    """Of one peer, whatever channels it opens. Times are seconds of a clock that only rises."""

    def __init__(self, now: float) -> None:
        self._sessions = _Tokens(*SESSIONS, now)
        self._messages = _Tokens(*MESSAGES, now)
        self._bytes = _Tokens(*BYTES, now)

    def wait(self, now: float, *, session: bool) -> float:
        """Seconds until the next message, which begins a `session` or does not, is listened to."""
        due = max(self._messages.wait(now), self._bytes.wait(now))
        return max(due, self._sessions.wait(now)) if session else due

    def heard(self, nbytes: int, *, session: bool) -> None:
        """A message of so many bytes was listened to."""
        self._messages.take(1.0)
        self._bytes.take(float(nbytes))
        if session:
            self._sessions.take(1.0)

    def is_rested(self, now: float) -> bool:
        """Whether nothing would be forgotten with it."""
        return all(one.is_full(now) for one in (self._sessions, self._messages, self._bytes))
