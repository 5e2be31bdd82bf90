"""Files are replaced whole or not at all, and names cannot leave their folder."""

import resource
import tempfile
from pathlib import Path

import pytest
from blake3 import blake3

from hetpeer.bootstrap.run.durable_files import (
    atomic_write,
    hash_file,
    made_beside,
    safe_join,
    temporary_folder,
)
from hetpeer.dht.base.errors import ExitCode, LocalError


def test_write_and_replace(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic_write(path, b"old")
    atomic_write(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert hash_file(path) == blake3(b"new").hexdigest()


def test_full_disk_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic_write(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(LocalError) as caught:
            atomic_write(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.code, caught.value.exit_code) == ("HP-DISK-002", ExitCode.TOO_SMALL)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalError) as caught:
        atomic_write(tmp_path / "file" / "a", b"")
    assert caught.value.code == "HP-DISK-001"


@pytest.mark.parametrize("name", ["..", "../a", "a/b", "/a", ".a", "", "a\n", "A"])
def test_names_from_outside_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a file name"):
        safe_join(tmp_path, name)


def test_plain_name_is_joined(tmp_path: Path) -> None:
    assert safe_join(tmp_path, "block-000.graph") == tmp_path / "block-000.graph"


def test_a_temporary_folder_is_gone_afterwards_and_needs_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("test") as folder:
        (folder / "a").touch()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(LocalError) as caught, temporary_folder("test"):
        pass
    assert (caught.value.code, caught.value.why) == ("HP-DISK-001", "Not a directory")


def failing(directory: Path, other: Path) -> None:
    """Begin a folder beside `directory`, make `other`, and fail."""
    with made_beside(directory) as folder:
        (folder / "file").touch()
        other.touch()
        raise ZeroDivisionError


def test_a_folder_that_fails_takes_the_parents_made_for_it_with_it(tmp_path: Path) -> None:
    for other, left in ((tmp_path / "other", ["other"]), (tmp_path / "a" / "own", ["a", "other"])):
        with pytest.raises(ZeroDivisionError):
            failing(tmp_path / "a" / "b" / "run", other)
        assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["own"]
