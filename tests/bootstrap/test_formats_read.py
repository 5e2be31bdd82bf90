"""Records of every format, and the errors of damaged ones: each names its place and leaves nothing behind."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from hetpeer.bootstrap.samples import record
from hetpeer.bootstrap.samples.documents import records, texts
from hetpeer.bootstrap.samples.formats import data_files
from hetpeer.bootstrap.samples.record import Progress
from hetpeer.dht.base.errors import ExitCode, LocalError
from tests.bootstrap.written_data import CHATS, TEXTS, written

ODD = [*TEXTS, 'a "quoted", text', "two\nlines", "äöü 漢字"]


def contents(path: Path, field: str | None = None) -> list[Any]:
    files = data_files([path], print)
    progress = Progress(print, total=sum(file.bytes for file in files))
    found = [record.content for record in records(files, field, progress)]
    assert 0.9 * progress.total <= progress.read <= progress.total
    return found


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet", "saved"])
@pytest.mark.parametrize("field", ["text", "body"])
def test_each_format_gives_its_texts_in_order(tmp_path: Path, name: str, field: str) -> None:
    path = written(tmp_path / name, ODD, field)
    assert contents(path, None if field == "text" else field) == ODD


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved"])
def test_chats_are_found_without_their_field_being_named(tmp_path: Path, name: str) -> None:
    assert contents(written(tmp_path / name, CHATS, "messages")) == CHATS


def test_a_folder_of_several_splits_gives_its_training_split(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = {"test": Dataset.from_dict({"text": ["no"]}), "train": Dataset.from_dict({"text": TEXTS})}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert contents(tmp_path / "saved") == TEXTS
    DatasetDict({"a": splits["test"], "b": splits["test"]}).save_to_disk(tmp_path / "other")
    with pytest.raises(LocalError, match="none called train: a, b"):
        contents(tmp_path / "other")


def jsonl(tmp_path: Path, line: bytes) -> Path:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    return path


def csv(tmp_path: Path, line: bytes) -> Path:
    path = tmp_path / "bad.csv"
    path.write_bytes(b'id,text\n1,"two\nlines"\n' + line + b"\n")
    return path


@pytest.mark.parametrize(
    ("bad", "line", "where", "why"),
    [
        (jsonl, b'{"text": "cut sh', "line 3 of", "it is no JSON"),
        (jsonl, b"\xff\xfe", "line 3 of", "it is no UTF-8 text"),
        (jsonl, b'["text"]', "line 3 of", "it is a JSON list"),
        (jsonl, b"[" * 100_000, "line 3 of", "it is no JSON"),
        (jsonl, b'{"body": 7}', "line 3 of", "it has no field 'text'; its fields: body"),
        (jsonl, b'{"text": 7}', "line 3 of", "its field holds a value of type int, no text or chat"),
        (jsonl, b'{"text": null}', "line 3 of", "its field holds nothing"),
        (jsonl, b'{"text": "\\ud800"}', "line 3 of", "no Unicode"),
        (csv, b"2", "line 4 of", "it has 1 fields, and the header has 2"),
        (csv, b'2,"never closed', "line 4 of", "it is no CSV"),
        (csv, b"2,caf\xe9", "line 4 of", "it is no UTF-8 text"),
    ],
)
def test_a_bad_line_is_named_by_its_number(
    tmp_path: Path, bad: Any, line: bytes, where: str, why: str
) -> None:
    path = bad(tmp_path, line)
    with pytest.raises(LocalError) as caught:
        [*texts(records(data_files([path], print), None, Progress(print)))]
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-008", ExitCode.CONFIG)
    assert caught.value.what == f"cannot use {where} {path}"
    assert why in caught.value.why


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_utf_16_is_named(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, TEXTS) if name != "a.txt" else tmp_path / name
    path.write_bytes((path.read_text() if path.exists() else "a text").encode("utf-16"))
    with pytest.raises(LocalError, match=r"HP-DATA-008.*it is no UTF-8 text.*do: convert the file to UTF-8"):
        contents(path)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_chat_that_is_written_as_a_text_is_refused(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, [json.dumps(chat) for chat in CHATS], "messages")
    with pytest.raises(LocalError, match=r"HP-DATA-008.*1 of|HP-DATA-008.*line 2 of") as caught:
        contents(path)
    assert caught.value.why == "its field holds a chat that is written as a text"


def test_semicolons_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text;id\na;1\n")
    with pytest.raises(LocalError, match=r"HP-DATA-008.*line 1 of.*separated by semicolons; do: .*commas"):
        contents(path)


def test_the_mark_of_utf_8_is_no_part_of_a_name(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv"):
        path = written(tmp_path / name, TEXTS)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert contents(path) == TEXTS


@pytest.mark.parametrize("content", ['[\n {"text": "a"}\n]', '[{"text": "a"}, {"text": "b"}]'])
def test_one_array_of_all_records_is_told_how_to_become_lines(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(LocalError, match="line 1 of") as caught:
        contents(path)
    assert caught.value.fix == "write one record a line, as `jq -c '.[]' FILE` does"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_disk_that_cannot_be_read_is_no_bug_of_ours(tmp_path: Path, name: str) -> None:
    """/proc/self/mem fails with EIO at its first byte."""
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(LocalError) as caught:
        [*records(data_files([tmp_path / name], print), None, Progress(print))]
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-001", ExitCode.CONFIG)
    assert caught.value.what == f"cannot read {tmp_path / name}"
    assert caught.value.why == "Input/output error"


def test_a_parquet_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.parquet", TEXTS)

    def refuse(*_: object, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", refuse)
    with pytest.raises(LocalError, match=r"HP-DATA-001.*Permission denied"):
        contents(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "saved"])
def test_a_missing_field_is_named_with_those_there_are(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, TEXTS, "body")
    with pytest.raises(LocalError, match="1 of") as caught:
        contents(path)
    assert caught.value.why == "it has no field 'text' or 'messages'; its fields: id, body"
    with pytest.raises(LocalError, match="1 of") as caught:
        contents(path, "txt")
    assert (caught.value.code, caught.value.why) == (
        "HP-DATA-008",
        "it has no field 'txt'; its fields: id, body",
    )


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_parquet_is_refused(tmp_path: Path, share: float) -> None:
    path = written(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(LocalError) as caught:
        contents(path)
    assert caught.value.code == "HP-DATA-008"
    assert caught.value.why.startswith("it is no whole parquet file: ")


def test_a_parquet_with_a_damaged_page_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", TEXTS)
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    with pytest.raises(LocalError, match="it is no whole parquet file"):
        contents(path)


def test_a_damaged_folder_of_datasets_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "saved", TEXTS)
    (arrow,) = path.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(LocalError, match="it is no whole folder of datasets"):
        contents(path)


def test_progress_says_how_fast_how_far_and_how_long_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(record.time, "monotonic", lambda: now)
    said: list[str] = []
    progress = Progress(said.append, total=1000)
    for _ in progress.count(range(2400)):
        now += 0.01
        progress.read = min(1000, progress.read + 1)
    assert said[0] == "500 samples, 100 a second, 50% of the data, about 5 s left"
    assert len(said) == 4  # one every five seconds
    function = Progress(said.append)
    now += 10
    function.add(30)
    assert said[-1] == "30 samples, 3 a second"
