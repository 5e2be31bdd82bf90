"""A reliable peer waits for room: one line when that begins, one when it ends; other failures end it."""

import logging
from pathlib import Path

import pytest

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.reliable import disk_wait
from hetpeer.peer.reliable.disk_wait import DiskWait

FULL = LocalError("HP-DISK-002", "no room", why="full", fix="free some")
OTHER = LocalError("HP-DISK-001", "cannot write", why="read-only", fix="choose another")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_wait, "LOOK_S", 0.0)


async def test_a_full_disk_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it began with a failed write, and is looked at several times."""
    looks = iter([FULL, FULL, None])

    def probe(_folder: Path, _needed: int) -> None:
        if (error := next(looks)) is not None:
            raise error

    monkeypatch.setattr(disk_wait, "probe_room", probe)
    disk = DiskWait(tmp_path)
    assert disk.error is None
    with caplog.at_level(logging.INFO):
        await disk.after(ExceptionGroup("of tasks", [FULL]))
        assert disk.error is FULL
        await disk.until_room()
    assert disk.error is None
    begun, ended = [record.getMessage() for record in caplog.records]
    assert begun == f"the reliable peer waits for room: {FULL.line()}"
    assert ended == f"there is room to write {tmp_path} again: the reliable peer goes on"


async def test_what_is_no_full_disk_is_raised(tmp_path: Path) -> None:
    disk = DiskWait(tmp_path)
    for failure in (
        OTHER,
        ExceptionGroup("of tasks", [FULL, OTHER]),
        ExceptionGroup("of tasks", [OSError()]),
    ):
        with pytest.raises(type(failure)):
            await disk.after(failure)
    assert disk.error is None
    with pytest.raises(LocalError, match="HP-DISK-001"):
        await DiskWait(tmp_path / "gone").until_room()


async def test_room_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    await DiskWait(tmp_path).until_room()
    assert not list(tmp_path.iterdir())
