"""Event files of a training curve, read back by TensorBoard itself."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.watching.curve_reader import CurveChange, PlacedPoint
from hetpeer.peer.watching.tensorboard_log import TensorboardLog

RUN_ID = "0123456789abcdef" * 2


def step(number: int, loss: float = 2.0, **fields: Any) -> PlacedPoint:
    whole = {"kind": "step", "step": number, "loss": loss, "norm": 0.5, "learning_rate": 1e-3, "time": 7.5}
    return PlacedPoint(number + 1, {**whole, "block_norms": [0.3, 0.4], **fields})


def evaluation(version: int, loss: float = 1.0) -> PlacedPoint:
    fields = {"kind": "evaluation", "step": version, "loss": loss, "perplexity": math.exp(loss)}
    return PlacedPoint(version, fields)


def written(logs: Path, *changes: CurveChange) -> Path:
    """Points that one start of `hetpeer watch` writes."""
    log = TensorboardLog(logs, "my-run", RUN_ID)
    for change in changes:
        log.add(change)
    log.close()
    return log.path


def shown(logs: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → (step, number) of each point that TensorBoard shows."""
    events = EventAccumulator(str(logs / "my-run"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_curve(tmp_path: Path) -> None:
    change = CurveChange([step(0, 3.0, tokens_per_second=64.0), evaluation(0), step(1, 2.5)])
    written(tmp_path, change)
    found = shown(tmp_path)
    assert found["train/loss"] == [(1, 3.0), (2, 2.5)]
    assert found["train/grad_norm"] == [(1, 0.5), (2, 0.5)]
    assert found["train/learning_rate"] == [(1, pytest.approx(1e-3)), (2, pytest.approx(1e-3))]
    assert found["train/tokens_per_second"] == [(1, 64.0)]
    assert found["eval/loss"] == [(0, 1.0)]
    assert found["eval/perplexity"] == [(0, pytest.approx(math.e))]
    assert found["grad_norm/block_001"] == [(1, pytest.approx(0.4)), (2, pytest.approx(0.4))]
    events = EventAccumulator(str(tmp_path / "my-run")).Reload()
    assert {one.wall_time for one in events.Scalars("train/loss")} == {7.5}, "when it was committed"


def test_what_a_roll_back_voids_is_not_shown(tmp_path: Path) -> None:
    first = CurveChange([step(number) for number in range(5)])
    written(tmp_path, first, CurveChange([step(2, 1.5), step(3, 1.25)], void_from=3))
    assert shown(tmp_path)["train/loss"] == [(1, 2.0), (2, 2.0), (3, 1.5), (4, 1.25)]


def test_a_restart_writes_no_point_twice(tmp_path: Path) -> None:
    """Neither what is shown nor the files have one twice, and what others have written stays."""
    points = [step(number) for number in range(3)]
    first = written(tmp_path, CurveChange(points))
    (other := first.with_name("events.out.tfevents.1.host.1.mine")).write_bytes(b"")
    second = written(tmp_path, CurveChange([*points, step(3)]))
    assert {first.parent / name for name in first.parent.iterdir()} == {second, other}
    assert [x for x, _ in shown(tmp_path)["train/loss"]] == [1, 2, 3, 4]
    steps = [event.step for event in EventFileLoader(str(second)).Load() if event.HasField("summary")]
    assert steps == [1, 2, 3, 4]


def test_what_is_written_is_seen_at_once(tmp_path: Path) -> None:
    log = TensorboardLog(tmp_path, "my-run", RUN_ID)
    log.add(CurveChange([step(0)]))
    assert shown(tmp_path)["train/loss"] == [(1, 2.0)]
    log.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(LocalError, match="HP-DISK-001") as caught:
        TensorboardLog(tmp_path / "logs", "my-run", RUN_ID)
    assert caught.value.exit_code == ExitCode.CONFIG


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(LocalError, match="HP-SYS-006") as caught:
        TensorboardLog(tmp_path, "my-run", RUN_ID)
    assert caught.value.fix == "pip install 'hetpeer[tensorboard]'"
