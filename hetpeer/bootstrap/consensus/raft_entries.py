"""The replicated log in a member's memory, and what a leader knows of its followers' copies. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from hetpeer.bootstrap.consensus.raft_messages import Append, Appended, LogEntry
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_log import PackedRecords

MEMBERS = "members"
"""Kind of the record that names the members from its place on: `{"kind": "members", "peers": [...]}`."""


class StoredEntries:
    """Log entries in order, stored compactly."""

    def __init__(self, entries: Iterable[LogEntry] = ()) -> None:
        self.terms = array("Q")
        self.records = PackedRecords()
        """Record of each entry; None for an entry that only begins a term."""
        self.replace(0, tuple(entries))

    def replace(self, begin: int, entries: Sequence[LogEntry]) -> None:
        """Keep the first `begin` entries and put `entries` after them."""
        self.terms[begin:] = array("Q", (entry.term for entry in entries))
        self.records.put(begin, (entry.record for entry in entries))


class Entries:
    """The log of a member, beginning with `stored`. `first`: members as long as no entry names them."""

    def __init__(self, first: Sequence[str], stored: StoredEntries) -> None:
        self._first = tuple(first)
        self._entries = stored
        self._memberships: list[tuple[int, tuple[str, ...]]] = []
        for place, record in enumerate(stored.records):
            self._note(place, record)

    def __len__(self) -> int:
        return len(self._entries.terms)

    @property
    def records(self) -> PackedRecords:
        """Record of each entry; None for an entry that only begins a term."""
        return self._entries.records

    def term_at(self, place: int) -> int:
        """Term of the entry at `place`."""
        return self._entries.terms[place]

    def part(self, begin: int, most: int) -> tuple[LogEntry, ...]:
        """Entries from place `begin` on, `most` of them at most."""
        terms, records = self._entries.terms, self._entries.records
        pairs = zip(terms[begin : begin + most], records[begin : begin + most], strict=True)
        return tuple(LogEntry(term=term, record=record) for term, record in pairs)

    def term_before(self, length: int) -> int:
        """Term of the last of the first `length` entries; 0 if there is none."""
        return self.term_at(length - 1) if length else 0

    @property
    def end(self) -> tuple[int, int]:
        """Last term and length, by which logs are compared."""
        return self.term_before(len(self)), len(self)

    @property
    def members(self) -> tuple[str, ...]:
        """Members by the last entry that names them, decided or not."""
        return self.members_at(len(self))

    def members_at(self, length: int) -> tuple[str, ...]:
        """Members by the first `length` entries."""
        known = [members for place, members in self._memberships if place < length]
        return known[-1] if known else self._first

    @property
    def changed_at(self) -> int:
        """Length at which the log contains the last change of members."""
        return self._memberships[-1][0] + 1 if self._memberships else 0

    def replace(self, begin: int, entries: Sequence[LogEntry]) -> None:
        """Keep the first `begin` entries and put `entries` after them."""
        self._entries.replace(begin, entries)
        self._memberships = [one for one in self._memberships if one[0] < begin]
        for place, entry in enumerate(entries, begin):
            self._note(place, entry.record)

    def _note(self, place: int, record: Record | None) -> None:
        if record is not None and record.get("kind") == MEMBERS:
            self._memberships.append((place, tuple(record["peers"])))

    def conflict(self, begin: int) -> int:
        """Place for a leader's retry if its entry before `begin` differs: before all entries of that term."""
        term = self.term_before(begin)
        while self.term_before(begin) == term and begin:
            begin -= 1
        return begin


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
        """Time at which `peer` last answered or began to follow us; None: it does not follow."""
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
        """Note an answer of this term. Returns whether to send `peer` more at once. `length`: of our log.

        A follower that lacks what it confirmed before is not answered at once: it would refuse without end.
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
