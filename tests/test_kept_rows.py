"""Rows of a long benchmark that is cut."""

from pathlib import Path

from benchmarks.kept_rows import KeptRows, commits


def test_a_row_is_found_again_by_what_was_asked(tmp_path: Path) -> None:
    asked = {"case": ("bottleneck", 16, "int8"), "seed": 1, "steps": 1000}
    row = {"loss": 3.5, "commit": "abc"}
    KeptRows(tmp_path / "new" / "folder").put(asked, row)
    later = KeptRows(tmp_path / "new" / "folder")
    assert later.get(dict(reversed(asked.items()))) == row
    assert all(later.get(asked | {name: 2}) is None for name in asked)


def test_a_row_that_was_cut_while_it_was_written_is_measured_again(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path)
    kept.put({"seed": 1}, {"loss": 3.5})
    (written,) = tmp_path.iterdir()
    written.with_suffix(".part").write_text(written.read_text()[:5])
    written.unlink()
    assert kept.get({"seed": 1}) is None


def test_without_a_folder_nothing_is_kept() -> None:
    kept = KeptRows(None)
    kept.put({"seed": 1}, {"loss": 3.5})
    assert kept.get({"seed": 1}) is None


def test_commits_are_named_once() -> None:
    assert commits([{"commit": "b"}, {"commit": "a"}, {"commit": "b"}]) == ["a", "b"]
