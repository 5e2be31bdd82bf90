"""A checkpoint that cannot be saved for a while: one line when that begins, one when it is over."""

import errno
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.service import effect_executor
from hetpeer.bootstrap.state.effects import CollectCheckpoint
from hetpeer.dht.base.trouble_line import TroubleLine


async def test_a_full_disk_is_told_once_and_so_is_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(effect_executor, "SAVE_RETRY_S", 0.0)
    room = iter([False, False, False, True, True])

    async def collect(order: CollectCheckpoint, _members: object) -> list[str]:
        if not next(room):
            with disk_errors(tmp_path / f"state of {order.version}"):
                raise OSError(errno.ENOSPC, "No space left on device")
        return ["digest"]

    host = SimpleNamespace(
        _checkpoints=SimpleNamespace(collect=collect),
        _replica=SimpleNamespace(members=()),
        _hear=lambda happens: happens(0.0),
        unsaved=TroubleLine(logging.getLogger(effect_executor.__name__), "checkpoints are saved again"),
        _core=SimpleNamespace(saved=lambda *_: [], not_saved=lambda *_: []),
    )
    with caplog.at_level(logging.INFO):
        for version in (5, 6, 7, 8, 9):
            order = CollectCheckpoint(m.TermView(term=1, view=0), version, {0: "a"})
            await effect_executor.EffectExecutor._collect(host, order)  # type: ignore[arg-type]
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("checkpoint 5 is not saved, and tried again: HP-DISK-002")
    assert last == "checkpoints are saved again"
