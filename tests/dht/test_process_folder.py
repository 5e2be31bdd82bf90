from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetpeer.dht.base.runtime import process_folder

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys
from hetpeer.dht.base.runtime import process_folder
folder = process_folder("test")
print(folder.name, flush=True)
sys.stdin.read()
"""
RACER = """
import os
from hetpeer.dht.base.runtime import process_folder
for _ in range(150):
    mine = [process_folder("race"), process_folder("race")]
    assert all(os.path.isdir(folder.name) for folder in mine)
    mine[0].cleanup()
    assert os.path.isdir(mine[1].name)
    mine[1].cleanup()
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextmanager
def process(program: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "."},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        yield started


def test_a_folder_is_private_and_gone_once_it_is_closed(folders: Path) -> None:
    with process_folder("test") as name:
        assert Path(name).parent == folders
        assert Path(name).stat().st_mode & 0o777 == 0o700
    assert list(folders.iterdir()) == []


def test_a_killed_processs_folder_is_removed_by_the_next_and_a_living_ones_is_not(folders: Path) -> None:
    with process(HOLDER) as killed, process(HOLDER) as living:
        assert killed.stdout is not None
        assert living.stdout is not None
        left, kept = (Path(of.readline().strip()) for of in (killed.stdout, living.stdout))
        (left / "streams.sock").touch()
        killed.kill()
        killed.wait()
        with process_folder("test") as mine:
            assert set(folders.iterdir()) == {kept, Path(mine)}
    assert list(folders.iterdir()) == []


def test_processes_that_start_at_once_remove_no_folder_in_use(folders: Path) -> None:
    with process(RACER) as one, process(RACER) as two, process(RACER) as three:
        assert {racer.wait() for racer in (one, two, three)} == {-9}
    process_folder("test").cleanup()
    assert list(folders.iterdir()) == []


def test_what_is_no_folder_of_ours_stays(folders: Path) -> None:
    with process_folder("test") as name:
        prefix = name.removesuffix(name.rsplit("-", 1)[1])
    other = folders / "other"
    other.mkdir()
    link, file, unrelated = Path(f"{prefix}link"), Path(f"{prefix}file"), folders / "hetpeer-run"
    link.symlink_to(other)
    file.touch()
    unrelated.mkdir()
    process_folder("test").cleanup()
    assert set(folders.iterdir()) == {other, link, file, unrelated}
