from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetpeer.bootstrap.log.record_log import Log
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import hold, in_use

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys
from pathlib import Path
from hetpeer.dht.identity.peer_identity import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def refusal(key: Path) -> LocalError:
    with pytest.raises(LocalError) as caught:
        hold(key)
    assert caught.value.exit_code == ExitCode.IDENTITY
    return caught.value


def test_a_second_process_is_told_the_first_ones_pid_and_gets_the_lock_when_that_is_killed(
    tmp_path: Path,
) -> None:
    key = tmp_path / "identity.key"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(key)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "."},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        error = refusal(key)
        assert error.code == "HP-ID-002"
        assert f"(pid {holder.pid})" in error.what
        holder.kill()
        holder.wait()
    os.close(hold(key))


def test_the_lock_is_let_go_of_with_its_descriptor_and_is_private(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    held = hold(key)
    assert refusal(key).code == "HP-ID-002"
    os.close(held)
    os.close(hold(key))
    assert (tmp_path / "identity.key.lock").stat().st_mode & 0o777 == 0o600


def test_a_lock_file_that_says_nothing_sensible_locks_all_the_same(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    held = hold(key)
    for content in (b"", b"\xff\xfe", b"12 monkeys", b"9" * 4000):
        (tmp_path / "identity.key.lock").write_bytes(content)
        assert refusal(key).code == "HP-ID-002"
    os.close(held)


def test_where_no_lock_can_be_made_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "identity.key.lock").mkdir()
    error = refusal(tmp_path / "identity.key")
    assert error.code == "HP-ID-001"
    assert "identity.key.lock" in error.why


def test_a_process_that_is_gone_is_not_named(tmp_path: Path) -> None:
    """Who holds another lock of the home asks for its name before it is written there."""
    key, lock = tmp_path / "identity.key", tmp_path / "identity.key.lock"
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    lock.write_text(f"{gone.pid}\n")
    assert "pid" not in in_use(key, tmp_path).what
    lock.write_text("1\n")
    assert "(pid 1)" in in_use(key, tmp_path).what


def test_a_disk_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    error = refusal(tmp_path / "identity.key")
    assert (error.code, error.why) == (
        "HP-ID-001",
        f"{tmp_path / 'identity.key.lock'}: {os.strerror(errno.ENOLCK)}",
    )
    with pytest.raises(LocalError, match="HP-DISK-001"):
        Log.open(tmp_path / "log")
