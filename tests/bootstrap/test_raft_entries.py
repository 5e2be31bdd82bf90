"""The replicated log in memory."""

from hetpeer.bootstrap.consensus.raft_entries import Entries, StoredEntries
from hetpeer.bootstrap.consensus.raft_messages import LogEntry


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
