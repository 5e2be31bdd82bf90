"""The training curve as W&B gets it, read back from its own offline files. It needs the extra `wandb`."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.watching.curve_reader import CurveChange, PlacedPoint
from hetpeer.peer.watching.wandb_log import WandbLog

RUN_ID = "0123456789abcdef" * 2
HEAD, RECORD, BLOCK = 7, struct.Struct("<IHB"), 1 << 15
"""Bytes of a file's head; head of a part of a record; bytes of a block (leveldb's log format)."""
LAST_PARTS = {1, 4}
"""Kinds of part with which a record ends."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def step(number: int, loss: float = 2.0) -> PlacedPoint:
    fields = {"kind": "step", "step": number, "loss": loss, "norm": 0.5, "learning_rate": 1e-3}
    return PlacedPoint(number + 1, fields)


def evaluation(version: int, loss: float = 1.0) -> PlacedPoint:
    return PlacedPoint(version, {"kind": "evaluation", "step": version, "loss": loss, "perplexity": 2.7})


def watched(folder: Path, *changes: CurveChange) -> Path:
    """Points that one start of `hetpeer watch` writes."""
    wandb = pytest.importorskip("wandb")
    while any(folder.glob(time.strftime("wandb/offline-run-%Y%m%d_%H%M%S-*"))):  # named by the second
        time.sleep(0.05)
    log = WandbLog("project", folder, "my-run", RUN_ID, {"steps": 4})
    for change in changes:
        log.add(change)
    log.close()
    wandb.teardown()  # as at the end of a process: its helper has written everything then
    return max(folder.glob("wandb/offline-run-*"))


def records(data: bytes) -> Iterator[bytes]:
    place, whole = HEAD, b""
    while place + RECORD.size <= len(data):
        if (left := BLOCK - place % BLOCK) < RECORD.size:
            place += left
            continue
        _, length, kind = RECORD.unpack_from(data, place)
        place += RECORD.size
        whole += data[place : place + length]
        place += length
        if kind in LAST_PARTS:
            yield whole
            whole = b""


def logged(folder: Path) -> list[dict[str, Any]]:
    """Points in all offline files, without W&B's own fields."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("history"):
                items = {
                    ".".join(item.nested_key) or item.key: item.value_json for item in record.history.item
                }
                found.append({name: json.loads(text) for name, text in items.items() if name[0] != "_"})
    return found


def test_wandb_gets_the_curve(tmp_path: Path) -> None:
    watched(tmp_path, CurveChange([step(0, 3.0), evaluation(0)]), CurveChange([step(1, 2.5)]))
    of_a_step = {"train/grad_norm": 0.5, "train/learning_rate": 1e-3}
    assert logged(tmp_path) == [
        {"step": 1, "train/loss": 3.0, **of_a_step},
        {"step": 0, "eval/loss": 1.0, "eval/perplexity": 2.7},
        {"step": 2, "train/loss": 2.5, **of_a_step},
    ]


def test_no_point_is_sent_twice(tmp_path: Path) -> None:
    """A roll-back repeats steps; a restart begins with the whole curve."""
    points = [step(number) for number in range(3)]
    first = watched(tmp_path, CurveChange(points), CurveChange([step(1), step(2), step(3)], void_from=2))
    assert [point["step"] for point in logged(tmp_path)] == [1, 2, 3, 4]
    second = watched(tmp_path, CurveChange([*points, step(3), step(4)]))
    assert [point["step"] for point in logged(tmp_path)] == [1, 2, 3, 4, 5]
    assert not first.exists(), "it was not sent, and the other one has all of it"
    next(second.glob("*.wandb")).with_suffix(".wandb.synced").touch()  # as `wandb sync` leaves it
    watched(tmp_path, CurveChange([step(number) for number in range(6)]))
    assert [point["step"] for point in logged(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb").teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(LocalError, match="HP-SYS-008") as caught:
        WandbLog("project", tmp_path, "my-run", RUN_ID, {})
    assert caught.value.exit_code == ExitCode.NETWORK
    assert "WANDB_MODE=offline" in caught.value.fix


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LocalError, match="HP-SYS-006") as caught:
        WandbLog("project", tmp_path, "my-run", RUN_ID, {})
    assert caught.value.fix == "pip install 'hetpeer[wandb]'"
