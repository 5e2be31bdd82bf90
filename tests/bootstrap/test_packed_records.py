"""A log in memory, as bytes: what is read is what was put there."""

import pytest

from hetpeer.bootstrap.consensus.raft_entries import Entries, StoredEntries
from hetpeer.bootstrap.consensus.raft_messages import LogEntry
from hetpeer.bootstrap.log.history import RECENT, History
from hetpeer.bootstrap.log.record_log import PackedRecords

RECORDS = [
    {"kind": "commit", "step": step, "loss": 1 / (step + 1), "slots": [["a", [1, 2]]]} for step in range(5)
]


def test_what_is_read_is_what_was_put_there() -> None:
    records = PackedRecords([*RECORDS, None])
    assert list(records) == records[:] == [*RECORDS, None]
    assert len(records) == 6
    assert records[-2] == RECORDS[-1]
    with pytest.raises(IndexError):
        records[6]


def test_who_keeps_a_record_keeps_it_alone() -> None:
    records = PackedRecords(RECORDS)
    records[0]["loss"] = 7.0
    assert records[0] == RECORDS[0]


def test_a_copy_goes_its_own_way() -> None:
    records = PackedRecords(RECORDS)
    other = records.copy()
    records.put(2, [None])
    other.put(len(other), [None])
    assert list(records) == [*RECORDS[:2], None]
    assert list(other) == [*RECORDS, None]


def test_what_is_on_a_shelf_is_read_from_there_and_takes_no_bytes_here() -> None:
    shelf = [{"kind": "another"}, *RECORDS]
    records = PackedRecords(RECORDS)
    records.shelve(1, shelf, 2)
    records.shelve(2, shelf, 3)
    other = records.copy()
    assert list(records) == records[:] == list(other) == RECORDS
    shelf[2] = {"kind": "changed"}
    assert records[1] == other[1] == {"kind": "changed"}
    records.put(2, [None])
    assert list(records) == [RECORDS[0], shelf[2], None]
    assert list(other)[2:] == RECORDS[2:]


def test_entries_that_are_replaced_take_their_members_with_them() -> None:
    log = Entries(("a", "b"), StoredEntries([LogEntry(term=1, record={"kind": "members", "peers": ["a"]})]))
    assert log.members == ("a",)
    assert log.changed_at == 1
    log.replace(
        1, (LogEntry(term=1, record={"kind": "members", "peers": ["a", "c"]}), LogEntry(term=2, record=None))
    )
    assert log.members == ("a", "c")
    assert log.end == (2, 3)
    log.replace(1, (LogEntry(term=3, record=None),))
    assert log.members == ("a",)
    assert log.part(0, 9)[1:] == (LogEntry(term=3, record=None),)
    log.replace(0, ())
    assert log.members == ("a", "b")
    assert log.end == (0, 0)


def commit(step: int) -> dict[str, object]:
    return {"kind": "commit", "step": step, "loss": 1.0}


def test_who_does_not_keep_the_whole_history_has_the_last_commits_of_it() -> None:
    steps = 3 * RECENT
    some, all_of_it = History(whole=False), History()
    for step in range(steps):
        some.add(commit(step))
        all_of_it.add(commit(step))
    assert list(some.commits) == list(range(steps - RECENT, steps))
    assert len(all_of_it.commits) == steps
    assert some.version == all_of_it.version == steps


def test_commits_that_are_taken_back_are_no_recent_ones() -> None:
    history = History(whole=False)
    back, steps = RECENT - 4, 2 * RECENT
    for step in range(steps):
        history.add(commit(step))
    history.add({"kind": "rollback", "view": 1, "to_version": back})
    assert not history.commits
    assert history.version == back
    for step in range(back, steps):
        history.add(commit(step))
    assert list(history.commits) == list(range(steps - RECENT, steps))
