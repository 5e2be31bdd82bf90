"""A volunteer's line is what its key signed, byte for byte of meaning."""

import json
import resource
from pathlib import Path

import pytest

from hetpeer.bootstrap.log.volunteer_log import (
    keep_event,
    last_event,
    read_event,
    read_events,
    sign_event,
)
from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.training.evidence_log import EventLog

RECORD = {"kind": "applied", "step": 3, "cover": [["Qm", [1, 2]]], "state": "ab", "loss": 0.1}


def test_signed_record_is_read(volunteers: list[Identity]) -> None:
    line = sign_event(RECORD, volunteers[0])
    assert read_event(line) == (volunteers[0].peer_id, RECORD)


def test_every_edited_number_is_refused(volunteers: list[Identity]) -> None:
    line = sign_event(RECORD, volunteers[0])
    end = line.index('"key"')
    digits = [position for position in range(end) if line[position].isdigit()]
    assert len(digits) == 5
    for position in digits:
        edited = line[:position] + str((int(line[position]) + 1) % 10) + line[position + 1 :]
        with pytest.raises(ProtocolError):
            read_event(edited)


def test_another_key_does_not_fit(volunteers: list[Identity]) -> None:
    fields = json.loads(sign_event(RECORD, volunteers[0]))
    fields["key"] = json.loads(sign_event(RECORD, volunteers[1]))["key"]
    with pytest.raises(ProtocolError):
        read_event(json.dumps(fields))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        "[]",
        "7",
        "null",
        "[" * 10_000,
        '{"record":{},"key":"","signature":""}',
        '{"record":{},"key":7,"signature":[]}',
        '{"record":{"a":' + "9" * 40 + '},"key":"AAAA","signature":"AAAA"}',
        '{"record":"\ud800","key":"AAAA","signature":"AAAA"}',
        '{"record":NaN,"key":"é","signature":"AAAA"}',
        "x" * (2**20 + 1),
    ],
    ids=range(12),
)
def test_junk_is_refused(line: str) -> None:
    with pytest.raises(ProtocolError):
        read_event(line)


def test_log_goes_on_after_a_torn_line(tmp_path: Path, volunteers: list[Identity]) -> None:
    path = tmp_path / "volunteers" / "log.jsonl"
    log = EventLog(path, volunteers[0])
    first = log.append(RECORD)
    log.close()
    with path.open("a") as file:
        file.write('{"record":')
    assert list(read_events(path)) == [(1, first + "\n")]
    log = EventLog(path, volunteers[0])
    second = log.append(RECORD | {"step": 4})
    log.close()
    assert path.read_text() == f"{first}\n{second}\n"


def test_without_room_lines_wait_in_memory_and_the_file_has_whole_ones(
    tmp_path: Path, volunteers: list[Identity]
) -> None:
    """They are in the log for those who read it, and in the file once there is room."""
    path = tmp_path / "log.jsonl"
    log = EventLog(path, volunteers[0])
    lines = [log.append(RECORD)]
    assert log.trouble is None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        lines += [log.append(RECORD | {"step": step}) for step in (4, 5)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.trouble is not None
    assert log.trouble.code == "HP-DISK-002"
    assert path.read_text() == f"{lines[0]}\n"
    for begin in range(4):
        assert log.lines(begin, 2) == lines[begin : begin + 2]
    assert [log.line(number) for number in range(3)] == lines
    lines.append(log.append(RECORD | {"step": 6}))
    assert log.trouble is None
    assert path.read_text().splitlines() == lines == log.lines(0, 9)
    log.close()


def test_a_torn_line_of_another_peer_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "peer.jsonl"
    keep_event(path, "first")
    with path.open("a") as file:
        file.write("torn by kill -9")
    keep_event(path, "second")
    keep_event(path, "third")
    assert path.read_text() == "first\nsecond\nthird\n"


def test_a_full_disk_leaves_the_other_peers_lines_whole(tmp_path: Path) -> None:
    path = tmp_path / "peer.jsonl"
    keep_event(path, "first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(LocalError) as error:
            keep_event(path, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.code == "HP-DISK-002"
    assert path.read_text() == "first\n"


def test_lines_from_any_place_also_after_a_death(tmp_path: Path, volunteers: list[Identity]) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, volunteers[0])
    lines = [log.append({"number": number}) for number in range(5)]
    for most in (1, 3, 9):
        assert [log.lines(begin, most) for begin in range(7)] == [lines[begin:][:most] for begin in range(7)]
    log.close()
    with path.open("a") as file:
        file.write(lines[0][:20])
    again = EventLog(path, volunteers[0])
    assert len(again) == 5
    lines.append(again.append({"number": 5}))
    assert again.lines(0, len(lines)) == lines
    again.close()


def test_the_last_line_is_the_last_complete_one_that_the_peer_has_signed(
    volunteers: list[Identity], tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    peer = volunteers[0].peer_id
    assert last_event(path, peer) == ""
    first, second = (sign_event({"number": number}, volunteers[0]) for number in (1, 2))
    path.write_text(f"{first}\n{second}\n")
    assert last_event(path, peer) == second
    path.write_text(f"{first}\nnonsense\n{sign_event({}, volunteers[1])}\n{second[:-1]}")
    assert last_event(path, peer) == first
    path.write_text(second)
    assert last_event(path, peer) == ""
