"""Formats of data files: what is not known is refused and never trained as bytes."""

from pathlib import Path

import pytest

from hetpeer.bootstrap.samples.formats import Format, data_files
from hetpeer.dht.base.errors import ExitCode, LocalError
from tests.bootstrap.engine import make_author
from tests.bootstrap.test_create import assert_fails


@pytest.mark.parametrize("name", ["data.dat", "data.JSON", "data.html", "data.bin", "data.jsonl.gz"])
def test_a_format_that_is_not_known_makes_no_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "words"}\n' * 500)
    model = make_author(tmp_path / "author")
    error = assert_fails(tmp_path, "HP-DATA-007", ExitCode.CONFIG, model=model, data=[tmp_path / name])
    assert name in error.what


def test_files_of_a_folder_in_other_formats_are_left_out_and_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "b.PY", "README", "x.png", "y.png", "z.json", ".hidden.png"):
        (tmp_path / name).write_text("words")
    said: list[str] = []
    found = data_files([tmp_path], said.append)
    assert [(file.path.name, file.format) for file in found] == [
        (name, Format.TEXT) for name in ("README", "a.txt", "b.PY")
    ]
    assert said == [f"files of {tmp_path} in other formats are left out: 1 .json, 2 .png"]


def test_a_folder_of_nothing_that_is_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("words")
    with pytest.raises(LocalError) as caught:
        data_files([tmp_path], print)
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-007", ExitCode.CONFIG)
