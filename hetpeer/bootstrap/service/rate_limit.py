"""Per-peer rate limit: excess messages are delayed, never dropped; other peers are unaffected.

Pure. A new session of a known volunteer is costly: a departure goes into the log of most reliable peers, and
others repeat its work. So few sessions are allowed. The limits on messages and bytes are what the event loop
and the parser can take from each peer (docs: SECURITY.md).
"""

from __future__ import annotations

SESSIONS = (0.2, 10.0)
"""Sessions: a second, and at once after a pause.

A volunteer begins one when the coordinator has forgotten or fenced it.
"""
MESSAGES = (1000.0, 4000.0)
"""Messages: a second, and at once.

An honest peer sends about one for each slot, block and 2 MiB of a reduce: ten a second in the swarm of two of
tests/hostile.
"""
BYTES = (8e6, 64e6)
"""Bytes: a second, and at once.

The largest are evidence for a new coordinator, a line of 1 to 10 kB for each block and step, and
fingerprints, 4 KiB for each block.
"""


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
    """The limit of one peer, over all its channels. Times are seconds of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._sessions = _Tokens(*SESSIONS, now)
        self._messages = _Tokens(*MESSAGES, now)
        self._bytes = _Tokens(*BYTES, now)

    def wait(self, now: float, *, session: bool) -> float:
        """Seconds until the next message may be read. `session`: whether it begins a session."""
        due = max(self._messages.wait(now), self._bytes.wait(now))
        return max(due, self._sessions.wait(now)) if session else due

    def heard(self, nbytes: int, *, session: bool) -> None:
        """Note that a message of this many bytes was read."""
        self._messages.take(1.0)
        self._bytes.take(float(nbytes))
        if session:
            self._sessions.take(1.0)

    def is_rested(self, now: float) -> bool:
        """Whether the limit is fully restored, so that it can be forgotten."""
        return all(one.is_full(now) for one in (self._sessions, self._messages, self._bytes))
