"""Rate limits of peers at a coordinator. Pure: times are seconds of a monotonic clock.

Each peer has a rate limit: excess messages are delayed, never dropped; other peers are unaffected. The limit
is set so that no peer keeps the event loop and the parser busy (SECURITY.md). A new session of a known
volunteer is costly, since others repeat its work: few are allowed.
"""

from __future__ import annotations

import math

SESSIONS = (0.2, 10.0)
"""Sessions of a peer, begun when it was forgotten or fenced: most per second, most at once after a pause."""
MESSAGES = (1000.0, 4000.0)
"""Messages of a peer: most per second, and most at once after a pause.

An honest peer sends about one for each slot, block and 2 MiB of a reduce: ten a second in tests/hostile.
"""
BYTES = (8e6, 64e6)
"""Bytes of a peer: most per second, and most at once after a pause.

The largest: evidence for a new coordinator, 1 to 10 kB a block and step; fingerprints, 4 KiB a block.
"""
READING = (0.1, 1.0)
"""Processor seconds to read a peer's messages: most per second, and most at once after a pause.

A message takes 0.1 ms, a line of evidence 0.3 ms, the largest list of fingerprints 50 ms.
"""
ALL_READING = (0.5, 0.02)
"""The same for all peers together. The second number bounds how long the event loop does nothing else."""
RECENT_S = 30.0
"""Half-life in seconds of the reading time by which peers are compared while messages wait."""


class TokenLevel:
    """A token bucket: `rate` tokens a second, at most `most`; taking more than are left makes others wait."""

    def __init__(self, rate: float, most: float, now: float) -> None:
        self._rate, self._most = rate, most
        self._left, self._at = most, now

    def left(self, now: float) -> float:
        """Tokens that are there; negative if more were taken."""
        self._left = min(self._left + max(now - self._at, 0.0) * self._rate, self._most)
        self._at = now
        return self._left

    def wait(self, now: float, needed: float = 0.0) -> float:
        """Seconds until `needed` tokens are there."""
        return max(0.0, needed - self.left(now)) / self._rate

    def take(self, amount: float) -> None:
        """Take this many tokens."""
        self._left -= amount

    def is_full(self, now: float) -> bool:
        """Whether nothing is missing."""
        return self.left(now) >= self._most


class RateLimit:
    """The limit of one peer, over all its channels."""

    def __init__(self, now: float) -> None:
        self._sessions = TokenLevel(*SESSIONS, now)
        self._messages = TokenLevel(*MESSAGES, now)
        self._bytes = TokenLevel(*BYTES, now)
        self._reading = TokenLevel(*READING, now)
        self._recent, self._recent_at = 0.0, now

    def wait(self, now: float, *, session: bool) -> float:
        """Seconds until the next message may be read. `session`: whether it begins a session."""
        due = max(self._messages.wait(now, 1.0), self._bytes.wait(now, 1.0), self._reading.wait(now))
        return max(due, self._sessions.wait(now, 1.0)) if session else due

    def heard(self, nbytes: int, *, session: bool) -> None:
        """Note that a message of this many bytes was read."""
        self._messages.take(1.0)
        self._bytes.take(float(nbytes))
        if session:
            self._sessions.take(1.0)

    def took(self, seconds: float, now: float) -> None:
        """Note the processor seconds that it took to read a message."""
        self._reading.take(seconds)
        self._recent, self._recent_at = self.recent(now) + seconds, now

    def recent(self, now: float) -> float:
        """Processor seconds of reading, those of RECENT_S ago counted half, and so on."""
        return self._recent * math.exp2((self._recent_at - now) / RECENT_S)

    def is_rested(self, now: float) -> bool:
        """Whether the limit is fully restored, so that it can be forgotten."""
        levels = (self._sessions, self._messages, self._bytes, self._reading)
        return all(one.is_full(now) for one in levels)
