"""The log keeps what it acknowledged through cuts and full disks, and refuses what was changed."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetpeer.bootstrap.log.record_log import HEAD, ROW, FirstRecords, Log, PackedRecords, read_log
from hetpeer.dht.base.errors import LocalError

RECORDS = [
    {"kind": "commit", "step": step, "gradients": {0: "ab" * 32}, "loss": 0.1 * step} for step in range(4)
]


@contextmanager
def disk_limit(size: int) -> Iterator[None]:
    """The kernel lets no file of this process grow beyond `size` bytes: a full disk, without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    log = Log.open(tmp_path / "ledger.log")
    for record in RECORDS:
        log.append(record)
    log.close()
    return tmp_path / "ledger.log"


def test_records_come_back(path: Path) -> None:
    log = Log.open(path)
    assert list(log) == RECORDS
    log.append({"kind": "more"})
    assert list(read_log(path)) == [*RECORDS, {"kind": "more"}]
    log.close()


def test_records_are_read_one_by_one_or_in_a_row(path: Path) -> None:
    log = Log.open(path)
    log.append({"kind": "one"}, {"kind": "two"})
    every = [*RECORDS, {"kind": "one"}, {"kind": "two"}]
    assert [log[place] for place in range(len(log))] == every
    assert log[-1] == {"kind": "two"}
    assert log[1:-1] == every[1:-1]
    assert log[len(every) :] == []
    assert (log[::2], log[::-1], log[3:1]) == (every[::2], every[::-1], [])
    with pytest.raises(IndexError):
        log[len(every)]
    first = FirstRecords(log)
    log.append({"kind": "three"})
    assert list(first) == first[:] == every
    assert first[-1] == every[-1]
    with pytest.raises(IndexError):
        first[len(every)]
    first.length += 1
    assert list(first) == list(log) == [*every, {"kind": "three"}]
    log.close()
    with pytest.raises(LocalError):
        log[0]


def test_who_reads_all_of_them_reads_those_that_come_meanwhile(path: Path) -> None:
    log = Log.open(path)
    log.append(*({"place": place} for place in range(2 * ROW)))
    rest = iter(log)
    read = [next(rest) for _ in range(ROW + 7)]
    log.append({"kind": "last"})
    assert [*read, *rest] == log[:]
    log.close()


def test_a_record_that_has_changed_since_it_was_written_is_not_read(path: Path) -> None:
    log = Log.open(path)
    size = path.stat().st_size // len(RECORDS)
    data = bytearray(path.read_bytes())
    data[size + HEAD.size] ^= 1
    path.write_bytes(data)
    assert log[0] == RECORDS[0]
    with pytest.raises(LocalError, match=f"byte {size}") as caught:
        log[1]
    assert caught.value.code == "HP-LOG-001"
    log.close()


def test_missing_log_has_no_records(tmp_path: Path) -> None:
    assert list(read_log(tmp_path / "none.log")) == []


def test_every_cut_keeps_the_whole_records_before_it(path: Path) -> None:
    data = path.read_bytes()
    size = len(data) // len(RECORDS)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        log = Log.open(path)
        assert list(log) == RECORDS[: length // size]
        assert path.stat().st_size == length - length % size
        log.append({"kind": "after"})
        assert list(log)[-1] == {"kind": "after"}
        log.close()


def test_a_tail_of_zeros_is_torn(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data + bytes(4096))
    log = Log.open(path)
    assert list(log) == RECORDS
    assert path.read_bytes() == data
    log.close()


def in_zeros(path: Path, record: dict[str, object], begin: int, end: int) -> bytes:
    """Append `record`, then overwrite the bytes `begin` to `end` of its frame by zeros, as lost pages are.

    Returns the log's bytes before.
    """
    whole = path.read_bytes()
    log = Log.open(path)
    log.append(record)
    log.close()
    frame = bytearray(path.read_bytes()[len(whole) :])
    end = min(end, len(frame))
    frame[begin:end] = bytes(end - begin)
    path.write_bytes(whole + frame)
    return whole


@pytest.mark.parametrize(
    ("begin", "end"),
    [(HEAD.size, 1 << 20), (4096, 1 << 20), (4096, 8192)],
    ids=["all of the payload", "its later pages", "a page in the middle"],
)
def test_a_last_record_with_pages_of_zeros_is_torn(path: Path, begin: int, end: int) -> None:
    """A power cut may leave the file's length and some pages, and others as zeros."""
    whole = in_zeros(path, {"kind": "large", "text": "x" * 20_000}, begin, end)
    assert list(read_log(path)) == RECORDS
    log = Log.open(path)
    assert list(log) == RECORDS
    assert path.read_bytes() == whole
    log.append({"kind": "after"})
    assert list(log) == [*RECORDS, {"kind": "after"}]
    log.close()


def test_a_short_last_record_of_zeros_and_a_head_across_two_pages_are_torn(path: Path) -> None:
    whole = in_zeros(path, {"kind": "short"}, HEAD.size, 1 << 20)
    log = Log.open(path)
    assert path.read_bytes() == whole
    log.append({"text": "x" * (4096 - 5 - len(whole) - HEAD.size - 9)})  # 9 bytes of msgpack around the text
    log.close()
    assert path.stat().st_size == 4096 - 5
    whole = in_zeros(path, {"kind": "across", "text": "x" * 300}, 5, 1 << 20)
    log = Log.open(path)
    assert list(log)[: len(RECORDS)] == RECORDS
    assert path.read_bytes() == whole
    log.close()


def test_zeros_in_a_record_before_the_last_are_damage(path: Path) -> None:
    in_zeros(path, {"kind": "large", "text": "x" * 20_000}, 4096, 8192)
    other = Log.open(path.with_name("other.log"))
    other.append({"kind": "after"})
    other.close()
    path.write_bytes(path.read_bytes() + other.path.read_bytes())
    with pytest.raises(LocalError) as caught:
        Log.open(path)
    assert caught.value.code == "HP-LOG-001"


def test_a_damaged_ledger_beside_a_sound_journal_can_be_told_again(path: Path) -> None:
    journal = path.with_name("raft.log")
    data = bytearray(path.read_bytes())
    data[HEAD.size] ^= 1
    for has, said in ((None, False), (bytes(data), False), (path.read_bytes(), True)):
        if has is not None:
            journal.write_bytes(has)
        (path.with_name("ledger.log")).write_bytes(data)
        with pytest.raises(LocalError) as caught:
            Log.open(path)
        assert ("tells it again" in caught.value.fix) is said
    journal.write_bytes(data)
    with pytest.raises(LocalError) as caught:
        Log.open(journal)
    assert "tells it again" not in caught.value.fix


def test_every_flipped_byte_is_refused(path: Path) -> None:
    data = path.read_bytes()
    size = len(data) // len(RECORDS)
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
        with pytest.raises(LocalError, match=f"byte {position // size * size}") as caught:
            Log.open(path)
        assert caught.value.code == "HP-LOG-001"
        assert "of several, name another in its place (hetpeer amend)" in caught.value.fix


def test_full_disk_leaves_the_log_valid(path: Path) -> None:
    log = Log.open(path)
    size = path.stat().st_size
    with disk_limit(size + 100), pytest.raises(LocalError) as caught:
        log.append({"kind": "too much", "text": "x" * 1000})
    assert caught.value.code == "HP-DISK-002"
    assert path.stat().st_size == size
    log.append({"kind": "fits"})
    assert list(log) == [*RECORDS, {"kind": "fits"}]
    log.close()


def test_one_process_at_a_time(path: Path) -> None:
    log = Log.open(path)
    with pytest.raises(LocalError) as caught:
        Log.open(path)
    assert caught.value.code == "HP-LOG-002"
    log.close()
    Log.open(path).close()


def test_unwritable_place_is_an_error(path: Path) -> None:
    with pytest.raises(LocalError) as caught:
        Log.open(path / "inside-a-file.log")
    assert caught.value.code == "HP-DISK-001"


# ── in memory, as bytes ─────────────────────────────────────────────────────────────────────────────────────

PACKED = [
    {"kind": "commit", "step": step, "loss": 1 / (step + 1), "slots": [["a", [1, 2]]]} for step in range(5)
]


def test_what_is_read_is_what_was_put_there() -> None:
    records = PackedRecords([*PACKED, None])
    assert list(records) == records[:] == [*PACKED, None]
    assert len(records) == 6
    assert records[-2] == PACKED[-1]
    with pytest.raises(IndexError):
        records[6]


def test_who_keeps_a_record_keeps_it_alone() -> None:
    records = PackedRecords(PACKED)
    records[0]["loss"] = 7.0
    assert records[0] == PACKED[0]


def test_what_is_on_a_shelf_is_read_from_there_and_takes_no_bytes_here() -> None:
    shelf = [{"kind": "another"}, *PACKED]
    records = PackedRecords(PACKED)
    records.shelve(1, shelf, 2)
    records.shelve(2, shelf, 3)
    assert list(records) == records[:] == PACKED
    shelf[2] = {"kind": "changed"}
    assert records[1] == {"kind": "changed"}
    records.put(2, [None])
    assert list(records) == [PACKED[0], shelf[2], None]
