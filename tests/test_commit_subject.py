"""The commit-msg hook: an area, a colon, at most 72 characters."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/commit_subject.py"


def fault(tmp_path: Path, message: str) -> str:
    """What the hook says of `message`; it fails if that is anything."""
    path = tmp_path / "COMMIT_EDITMSG"
    path.write_text(message, encoding="utf-8")
    done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, check=False)
    assert done.returncode == bool(done.stderr)
    return done.stderr


@pytest.mark.parametrize(
    "message",
    [
        "dht: a record has one signature\n\nWhy: two were never compared. " + "x" * 80,
        "docs, tests: plain words",
        "peer/web: a page in dark",
        "# a comment of git\n\ndht: " + "x" * 67,
        "Merge branch 'main'",
        'Revert "dht: a record has one signature"',
    ],
)
def test_a_good_subject_passes(tmp_path: Path, message: str) -> None:
    assert fault(tmp_path, message) == ""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("", "does not begin with an area"),
        ("A record has one signature", "does not begin with an area"),
        ("Dht: a record", "does not begin with an area"),
        ("dht:a record", "does not begin with an area"),
        ("dht: " + "x" * 68, "has 73 characters, 72 at most"),
    ],
)
def test_a_bad_subject_is_refused(tmp_path: Path, message: str, says: str) -> None:
    assert says in fault(tmp_path, message)
