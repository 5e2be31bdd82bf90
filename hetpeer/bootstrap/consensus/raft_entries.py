"""The log as a member has it in memory, and what can be read off it. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from hetpeer.bootstrap.consensus.raft_messages import LogEntry
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.packed_records import PackedRecords

MEMBERS = "members"
"""Kind of the record that says who the members are, from its place in the log on: `{"kind": "members", "peers": [...]}`."""


class StoredEntries(Sequence[LogEntry]):
    """Entries in order, in as few bytes as they take."""

    def __init__(self, entries: Iterable[LogEntry] = ()) -> None:
        self.terms = array("Q")
        self.records = PackedRecords()
        """None where a leader only begins its term."""
        self.replace(0, tuple(entries))

    @overload
    def __getitem__(self, place: int) -> LogEntry: ...
    @overload
    def __getitem__(self, place: slice) -> list[LogEntry]: ...
    def __getitem__(self, place: int | slice) -> LogEntry | list[LogEntry]:
        if isinstance(place, slice):
            pairs = zip(self.terms[place], self.records[place], strict=True)
            return [LogEntry(term=term, record=record) for term, record in pairs]
        return LogEntry(term=self.terms[place], record=self.records[place])

    def __len__(self) -> int:
        return len(self.terms)

    def replace(self, begin: int, entries: Sequence[LogEntry]) -> None:
        """The first `begin` ones and then these."""
        self.terms[begin:] = array("Q", (entry.term for entry in entries))
        self.records.put(begin, (entry.record for entry in entries))

    def copy(self) -> StoredEntries:
        """The same ones, to go on otherwise."""
        other = StoredEntries()
        other.terms, other.records = self.terms[:], self.records.copy()
        return other


class Entries:
    """The log of a member that knows `stored`; `first` are the members where no entry says who they are."""

    def __init__(self, first: Sequence[str], stored: StoredEntries) -> None:
        self._first = tuple(first)
        self._entries = stored
        self._memberships: list[tuple[int, tuple[str, ...]]] = []
        for place, record in enumerate(stored.records):
            self._note(place, record)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def records(self) -> PackedRecords:
        """What the entries are about; None where a leader only began its term."""
        return self._entries.records

    def term_at(self, place: int) -> int:
        """The term of the entry there."""
        return self._entries.terms[place]

    def part(self, begin: int, most: int) -> tuple[LogEntry, ...]:
        """At most so many entries from place `begin` on."""
        return tuple(self._entries[begin : begin + most])

    def term_before(self, length: int) -> int:
        """The term of the last of the first `length` entries; 0 if there is none."""
        return self.term_at(length - 1) if length else 0

    @property
    def end(self) -> tuple[int, int]:
        """What logs are compared by: the last term, and the length."""
        return self.term_before(len(self)), len(self)

    @property
    def members(self) -> tuple[str, ...]:
        """Those of the last entry about them, decided or not."""
        return self.members_at(len(self))

    def members_at(self, length: int) -> tuple[str, ...]:
        """Those that the first `length` entries say."""
        known = [members for place, members in self._memberships if place < length]
        return known[-1] if known else self._first

    @property
    def changed_at(self) -> int:
        """How long the log must be for the last change of members to be in it."""
        return self._memberships[-1][0] + 1 if self._memberships else 0

    def replace(self, begin: int, entries: Sequence[LogEntry]) -> None:
        """The log is its first `begin` entries and then these."""
        self._entries.replace(begin, entries)
        self._memberships = [one for one in self._memberships if one[0] < begin]
        for place, entry in enumerate(entries, begin):
            self._note(place, entry.record)

    def _note(self, place: int, record: Record | None) -> None:
        if record is not None and record.get("kind") == MEMBERS:
            self._memberships.append((place, tuple(record["peers"])))

    def conflict(self, begin: int) -> int:
        """Where a leader is to try again whose entry before `begin` is another: before all entries of that term."""
        term = self.term_before(begin)
        while self.term_before(begin) == term and begin:
            begin -= 1
        return begin
