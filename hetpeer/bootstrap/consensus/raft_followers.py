"""Followers as a leader knows them: how much of the log they have, and when they last answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetpeer.bootstrap.consensus.raft_entries import Entries
from hetpeer.bootstrap.consensus.raft_messages import Append, Appended

BATCH = 64
"""Most entries of one message."""
WINDOW = 256
"""Most entries under way to one follower."""
NEAR = 8
"""A learner that lacks fewer entries than this has caught up."""


class Followers:
    """Followers of a leader in a term that begins at `now`."""

    def __init__(self, peers: Iterable[str], now: float) -> None:
        self._next: dict[str, int] = {}
        self._match: dict[str, int] = {}
        self._answered = dict.fromkeys(peers, now)

    def match(self, peer: str) -> int:
        """Entries that are durable at `peer`."""
        return self._match.get(peer, 0)

    def welcome(self, peers: Iterable[str], now: float) -> None:
        """Add followers."""
        for peer in peers:
            self._answered.setdefault(peer, now)

    def heard_since(self, at: float) -> set[str]:
        """Followers that have answered after `at`."""
        return {peer for peer, answered in self._answered.items() if answered > at}

    def answered_at(self, peer: str) -> float | None:
        """When `peer` last answered, or began to follow us; None: it does not follow."""
        return self._answered.get(peer)

    def idle(self, peer: str, place: int) -> bool:
        """Whether `peer` may be sent a new entry at `place` without waiting for an answer."""
        return self._next.get(peer, place) - self.match(peer) < WINDOW

    def caught_up(self, peer: str, length: int) -> bool:
        """Whether `peer` lacks next to nothing of a log of `length` entries."""
        return peer in self._match and length - self._match[peer] < NEAR

    def append(self, peer: str, log: Entries, term: int, decided: int) -> Append:
        """The next entries that `peer` lacks, as far as we know; a heartbeat if there are none."""
        begin = self._next.setdefault(peer, max(len(log) - 1, 0))
        entries = log.part(begin, BATCH)
        self._next[peer] = begin + len(entries)
        return Append(
            term=term, begin=begin, last_term=log.term_before(begin), entries=entries, committed=decided
        )

    def answered(self, peer: str, answer: Appended, length: int, now: float) -> bool:
        """Note an answer of this term. Returns whether `peer` is to be sent more at once. `length`: of our
        log.

        A follower that lacks what it had confirmed before is not answered at once: it would refuse that too,
        without end.
        """
        self._answered[peer] = now
        if answer.fits:
            self._match[peer] = max(self.match(peer), answer.length)
            self._next[peer] = max(self._next.get(peer, 0), self._match[peer])
            return self._next[peer] < length
        self._next[peer] = max(self.match(peer), min(answer.length, length))
        return answer.length >= self.match(peer)

    def had_by_most(self, members: Sequence[str], me: str, length: int) -> int:
        """Entries that are durable at most `members`; we (`me`) have all `length`."""
        lengths = sorted(length if peer == me else self.match(peer) for peer in members)
        return lengths[(len(members) - 1) // 2]
