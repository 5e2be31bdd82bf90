"""`metrics.jsonl` is the curve of the log at any time, and nothing that happens to it harms the run."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage import metrics_file
from hetpeer.bootstrap.storage.metrics_file import MetricsFile
from hetpeer.bootstrap.storage.training_curve import curve_points
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.reliable import metrics_writer
from hetpeer.peer.reliable.metrics_writer import write_forever
from hetpeer.peer.watching.curve_reader import CurveReader, PlacedPoint
from tests.amounts import examples
from tests.bootstrap.curve_logs import LOGS, commit, evaluation, rollback

ROOM = 1 << 60
"""Bytes that no disk has free."""


def points_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_finished_run_is_written_as_a_whole(trained: RunDirectory) -> None:
    records = list(read_log(trained.log_path))
    MetricsFile(trained, records, Clock()).follow()
    found = points_in(trained.metrics_path)
    assert all("time" not in point for point in found), "nobody knows when"
    assert sorted(found, key=lambda p: (p["step"], p["kind"] == "step")) == curve_points(
        trained.manifest, records
    )


def test_it_grows_and_is_replaced_after_a_roll_back(fresh: RunDirectory, clock: Clock) -> None:
    records: list[dict[str, Any]] = []
    metrics, path = MetricsFile(fresh, records, clock), fresh.metrics_path
    metrics.follow()
    assert path.read_bytes() == b""
    first = path.stat().st_ino
    for number in range(3):
        records.append(commit(number))
        assert metrics.is_behind
        clock.now += 1
        metrics.follow()
        assert not metrics.is_behind
    assert path.stat().st_ino == first
    assert [(p["step"], p["time"]) for p in points_in(path)] == [(0, 1001.0), (1, 1002.0), (2, 1003.0)]
    records += [rollback(1), commit(1, view=1)]
    clock.now = 2000.0
    metrics.follow()
    assert path.stat().st_ino != first, "a reader sees that it is another one"
    assert [(p["step"], p["view"], p["time"]) for p in points_in(path)] == [(0, 0, 1001.0), (1, 1, 2000.0)]


def test_a_restart_keeps_what_the_file_knows(fresh: RunDirectory, clock: Clock) -> None:
    records = [commit(0)]
    MetricsFile(fresh, records, clock).follow()
    metrics = MetricsFile(fresh, records, clock)
    records.append(commit(1))
    metrics.follow()
    with fresh.metrics_path.open("ab") as file:
        file.write(b'[1]\nnonsense\n{"a": 1, "time": "x"}\n{"kind": "st')  # a crash, or somebody's editor
    records += [evaluation(1), commit(2)]
    clock.now = 3000.0
    again = MetricsFile(fresh, records, clock)
    again.follow()
    found = [(p["kind"], p["step"], p.get("time")) for p in points_in(fresh.metrics_path)]
    assert found == [("step", 0, None), ("step", 1, 1000.0), ("evaluation", 1, None), ("step", 2, None)]
    fresh.metrics_path.unlink()
    records.append(commit(3))
    again.follow()
    assert [p["step"] for p in points_in(fresh.metrics_path)] == [0, 1, 1, 2, 3]


def test_without_room_the_log_comes_first(
    fresh: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [commit(0)]
    metrics = MetricsFile(fresh, records, clock)
    metrics.follow()
    records.append(commit(1))
    with monkeypatch.context() as patched:
        patched.setattr(metrics_file, "SPARED_BYTES", ROOM)
        for _ in range(2):
            with pytest.raises(LocalError, match="HP-DISK-002"):
                metrics.follow()
            assert metrics.is_behind
        assert [p["step"] for p in points_in(fresh.metrics_path)] == [0], "nothing is half-written"
    metrics.follow()
    assert [p["step"] for p in points_in(fresh.metrics_path)] == [0, 1]


async def test_a_full_disk_stops_nothing_and_is_said_once(
    fresh: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("LOOK_S", "AGAIN_S"):
        monkeypatch.setattr(metrics_writer, name, 0.001)
    records = [commit(0)]
    metrics, tried = MetricsFile(fresh, records, clock), 0

    def follow() -> None:
        nonlocal tried
        tried += 1
        MetricsFile.follow(metrics)

    monkeypatch.setattr(metrics, "follow", follow)
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patched:
            patched.setattr(metrics_file, "SPARED_BYTES", ROOM)
            ready = asyncio.Event()
            ready.set()
            writing = asyncio.ensure_future(write_forever(metrics, ready))
            while tried < 3:
                await asyncio.sleep(0.001)
        while len(caplog.records) < 2:  # that it failed, and that it worked
            await asyncio.sleep(0.001)
        records.append(commit(1))
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    assert [p["step"] for p in points_in(fresh.metrics_path)] == [0, 1], "what came last is there, too"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "HP-DISK-002" in lines[0]
    assert lines[1].endswith("metrics.jsonl is written again")


class Follower:
    """Keeps the points that a reader's changes leave."""

    def __init__(self, reader: CurveReader) -> None:
        self._reader = reader
        self.points: list[PlacedPoint] = []

    def look(self) -> None:
        for change in self._reader.look():
            if (begin := change.void_from) is not None:
                self.points = [point for point in self.points if point.x < begin]
            self.points += change.points

    @property
    def seen(self) -> list[tuple[int, str]]:
        return sorted((point.x, json.dumps(point.fields)) for point in self.points)


@examples(200)
@given(LOGS, st.data())
def test_a_reader_that_follows_has_each_point_once(
    fresh_template: RunDirectory,
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, Any]],
    data: st.DataObject,
) -> None:
    """It looks at any time, and the reliable peer may have been started again meanwhile."""
    run = RunDirectory(tmp_path_factory.mktemp("followed"), fresh_template.signed)
    follower, grown, clock = Follower(CurveReader(run.metrics_path)), list[dict[str, Any]](), Clock()
    metrics = MetricsFile(run, grown, clock)
    for record in records:
        grown.append(record)
        clock.now += 1
        if data.draw(st.integers(0, 7)) == 0:
            metrics = MetricsFile(run, grown, clock)
        metrics.follow()
        if data.draw(st.booleans()):
            follower.look()
    metrics.follow()
    follower.look()
    wanted = points_in(run.metrics_path)
    places = [(p["step"] + (p["kind"] == "step"), json.dumps(p)) for p in wanted]
    assert follower.seen == sorted(places)
    assert len({(p["kind"], p["step"]) for p in wanted}) == len(wanted)
