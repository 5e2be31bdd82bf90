"""The log as a member has it in memory, and what can be read off it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetpeer.bootstrap.raft.messages import Entry

MEMBERS = "members"
"""Kind of the record that says who the members are, from its place in the log on: `{"kind": "members", "peers": [...]}`."""


class Entries:
    """Entries in order; `first` are the members where no entry says who they are."""

    def __init__(self, first: Sequence[str], entries: Iterable[Entry] = ()) -> None:
        self._first = tuple(first)
        self._entries: list[Entry] = []
        self._memberships: list[tuple[int, tuple[str, ...]]] = []
        self.replace(0, tuple(entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, place: int) -> Entry:
        return self._entries[place]

    def part(self, begin: int, most: int) -> tuple[Entry, ...]:
        """At most so many entries from place `begin` on."""
        return tuple(self._entries[begin : begin + most])

    def term_before(self, length: int) -> int:
        """The term of the last of the first `length` entries; 0 if there is none."""
        return self._entries[length - 1].term if length else 0

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

    def replace(self, begin: int, entries: Sequence[Entry]) -> None:
        """The log is its first `begin` entries and then these."""
        self._entries[begin:] = entries
        self._memberships = [one for one in self._memberships if one[0] < begin]
        for place, entry in enumerate(entries, begin):
            if entry.record is not None and entry.record.get("kind") == MEMBERS:
                self._memberships.append((place, tuple(entry.record["peers"])))

    def conflict(self, begin: int) -> int:
        """Where a leader is to try again whose entry before `begin` is another: before all entries of that term."""
        term = self.term_before(begin)
        while self.term_before(begin) == term and begin:
            begin -= 1
        return begin
