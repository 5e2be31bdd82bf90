"""Identities are kept: backed up, brought back, never lost on the way."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity, hold
from hetpeer.peer.cli import main
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.identity_backup import backup, restore


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.create(tmp_path_factory.mktemp("ours") / "identity.key")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.create(tmp_path_factory.mktemp("other") / "identity.key")


def put(identity: Identity, path: Path, mode: int = 0o600) -> Path:
    path.touch(mode=mode)
    path.write_bytes(identity.path.read_bytes())
    path.chmod(mode)
    return path


def refused(code: str, work, *arguments, **options) -> LocalError:  # type: ignore[no-untyped-def]
    with pytest.raises(LocalError) as caught:
        work(*arguments, **options)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.IDENTITY)
    return caught.value


def test_what_was_backed_up_comes_back_in_another_home(ours: Identity, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        assert backup(ours.path, tmp_path / "copy").peer_id == ours.peer_id
        assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
        key = tmp_path / "home" / "identity.key"
        restored = restore(tmp_path / "copy", key, replace=False)
    finally:
        os.umask(old)
    assert (restored.peer_id, restored.kept, restored.shared) == (ours.peer_id, None, False)
    assert key.stat().st_mode & 0o777 == 0o600
    assert Identity.load(key).peer_id == ours.peer_id


def test_a_backup_never_replaces_a_file_and_leaves_no_half(ours: Identity, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"precious")
    refused("HP-ID-003", backup, ours.path, there)
    assert there.read_bytes() == b"precious"
    refused("HP-ID-003", backup, ours.path, tmp_path / "no" / "such")
    refused("HP-ID-001", backup, tmp_path / "none", tmp_path / "copy")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        refused("HP-ID-003", backup, ours.path, tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_another_identity_is_replaced_only_if_asked_and_is_kept(
    ours: Identity, other: Identity, tmp_path: Path
) -> None:
    key = put(other, tmp_path / "identity.key")
    assert refused("HP-ID-004", restore, ours.path, key, replace=False).why == other.peer_id
    assert Identity.load(key).peer_id == other.peer_id
    first = restore(ours.path, key, replace=True)
    assert first.kept == tmp_path / "identity.key.old"
    assert Identity.load(first.kept).peer_id == other.peer_id
    again = restore(ours.path, key, replace=True)
    assert (again.kept, again.peer_id) == (None, ours.peer_id)
    second = restore(other.path, key, replace=True)
    assert second.kept == tmp_path / "identity.key.old-2"
    assert Identity.load(second.kept).peer_id == ours.peer_id
    assert Identity.load(key).peer_id == other.peer_id


def test_a_damaged_key_is_another_one_and_is_kept_too(ours: Identity, tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    key.write_bytes(b"half")
    assert "damaged" in refused("HP-ID-004", restore, ours.path, key, replace=False).why
    kept = restore(ours.path, key, replace=True).kept
    assert kept is not None
    assert kept.read_bytes() == b"half"
    assert Identity.load(key).peer_id == ours.peer_id


def test_a_damaged_copy_changes_nothing(other: Identity, tmp_path: Path) -> None:
    key = put(other, tmp_path / "identity.key")
    copy = tmp_path / "copy"
    copy.write_bytes(key.read_bytes()[:-1])
    refused("HP-ID-001", restore, copy, key, replace=True)
    refused("HP-ID-001", restore, tmp_path / "none", key, replace=True)
    assert Identity.load(key).peer_id == other.peer_id
    assert not (tmp_path / "identity.key.old").exists()


def test_a_copy_on_a_disk_without_modes_is_taken_and_said(ours: Identity, tmp_path: Path) -> None:
    copy = put(ours, tmp_path / "copy", 0o644)
    key = tmp_path / "home" / "identity.key"
    assert restore(copy, key, replace=False).shared
    assert Identity.load(key).peer_id == ours.peer_id


def test_an_identity_in_use_is_not_replaced(ours: Identity, other: Identity, tmp_path: Path) -> None:
    key = put(other, tmp_path / "identity.key")
    held = hold(key)
    refused("HP-ID-002", restore, ours.path, key, replace=True)
    os.close(held)
    assert Identity.load(key).peer_id == other.peer_id


def test_a_restored_identity_goes_on_above_what_it_used_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    before = Home(tmp_path / "old").next_incarnation()
    assert before >= int(time.time()) - 1
    assert Home(tmp_path / "new").next_incarnation() >= before
    ahead = before + 1000
    (tmp_path / "new" / "incarnation").write_text(str(ahead))
    assert Home(tmp_path / "new").next_incarnation() == ahead + 1
    assert Home(tmp_path / "new").next_incarnation() == ahead + 2


def test_the_commands(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main.app, ["id", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    copy = str(tmp_path / "copy")
    peer_id, reliable = run("--home", one), run("--reliable", "--home", one)
    assert peer_id != reliable
    run("backup", copy, "--home", one)
    assert run("restore", copy, "--home", two) == peer_id
    assert run("--home", two) == peer_id
    assert run("restore", copy, "--replace", "--reliable", "--home", one) == peer_id
    assert (tmp_path / "one" / "reliable.key.old").exists()
    assert CliRunner().invoke(main.app, ["id", "--home", one, "backup", copy]).exit_code == ExitCode.USAGE
