"""Room for what is fetched of runs: what other runs left goes first, the oldest before others, and what
nobody else has stays.

That shards of our own run go is test_datasource's.
"""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.preparation import disk_room
from hetpeer.peer.preparation.disk_room import Room, check_room, make_room, taken

OWN, OLD, OLDER, MADE = (digit * 32 for digit in "abcd")
KIB = 1 << 10


def run(runs: Path, name: str, joined: float, files: Mapping[str, int]) -> Path:
    for place, nbytes in files.items():
        path = runs / name / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(nbytes))
    manifest = runs / name / "manifest.hetpeer"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.touch()
    os.utime(manifest, (joined, joined))
    return runs / name


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs that were joined from here, and one that was made here."""
    runs = tmp_path / "runs"
    shards = {"data/a.shard": 4 * KIB, "data/b.shard": 4 * KIB}
    run(runs, OWN, 300.0, shards)
    run(runs, OLD, 200.0, shards)
    run(
        runs,
        OLDER,
        100.0,
        {**shards, "graph/g.graph": KIB, "events.jsonl": KIB, "work": 10, "traces/1.jsonl": KIB},
    )
    run(runs, MADE, 1.0, {**shards, "owner.key": 32})
    return runs


class WantsAll:
    """A reader that needs all shards of our run."""

    def wanted(self) -> frozenset[str]:
        return frozenset(f"{name}.shard" for name in "abcdef")

    def forget(self, shards: Sequence[str]) -> None:
        assert shards == []


def limited(runs: Path, limit: Callable[[], float]) -> Room:
    room = Room(runs, OWN, limit)
    room.reader = WantsAll()
    return room


async def fetched(room: Room, runs: Path, name: str, nbytes: int) -> None:
    async with room.for_file(nbytes):
        await asyncio.to_thread(atomic_write, runs / OWN / "data" / name, bytes(nbytes))


async def test_what_the_oldest_left_goes_first_and_its_evidence_never(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    total = taken(runs)
    room = limited(runs, lambda: total + 2 * KIB)
    await fetched(room, runs, "c.shard", 2 * KIB)
    assert len(left(runs / OLDER)) == 7, "it fits"
    assert caplog.text == ""
    await fetched(room, runs, "d.shard", KIB)
    assert left(runs / OLDER) == {
        "data/a.shard",
        "data/b.shard",
        "events.jsonl",
        "work",
        "traces/1.jsonl",
        "manifest.hetpeer",
    }
    assert f"of run {OLDER} made room" in caplog.text
    await fetched(room, runs, "e.shard", 12 * KIB)
    assert left(runs / OLDER) == {"events.jsonl", "work", "traces/1.jsonl", "manifest.hetpeer"}
    assert len(left(runs / OLD) & {"data/a.shard", "data/b.shard"}) == 1, "no more than was needed"
    assert taken(runs) <= total + 2 * KIB
    with pytest.raises(LocalError, match="HP-DISK-005") as caught:
        await fetched(room, runs, "f.shard", 6 * KIB)
    assert caught.value.exit_code == ExitCode.TOO_SMALL
    assert left(runs / OWN) == {"manifest.hetpeer", *(f"data/{name}.shard" for name in "abcde")}, (
        "nothing is half written"
    )
    assert left(runs / MADE) == {"data/a.shard", "data/b.shard", "owner.key", "manifest.hetpeer"}


async def test_files_that_are_on_their_way_count(runs: Path) -> None:
    room = limited(runs, lambda: taken_at_first + 10 * KIB)
    make_room(runs, OWN, math.inf)
    taken_at_first = taken(runs)
    async with room.for_file(6 * KIB):
        with pytest.raises(LocalError, match="HP-DISK-005"):
            await fetched(room, runs, "c.shard", 6 * KIB)
        await fetched(room, runs, "c.shard", 3 * KIB)
    await fetched(room, runs, "d.shard", 6 * KIB)  # the one that was on its way has not been written


async def test_one_that_did_not_come_takes_no_room_and_a_limit_may_be_raised(runs: Path) -> None:
    make_room(runs, OWN, math.inf)
    limit = float(taken(runs) + 4 * KIB)
    room = limited(runs, lambda: limit)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            async with room.for_file(3 * KIB):
                raise ConnectionError
    await fetched(room, runs, "c.shard", 3 * KIB)
    with pytest.raises(LocalError, match="HP-DISK-005"):
        await fetched(room, runs, "d.shard", 3 * KIB)
    limit = math.inf
    await fetched(room, runs, "d.shard", 3 * KIB)
    (runs / OWN / "data" / "d.shard").unlink()  # its owner has cleared up
    limit = taken(runs) + 3.0 * KIB
    await fetched(room, runs, "e.shard", 3 * KIB)


async def test_what_a_killed_process_has_half_written_goes(runs: Path) -> None:
    half = runs / OWN / "data" / ".c.shard.x7f"
    half.write_bytes(bytes(KIB))
    outside = runs.parent / "mine"
    outside.write_bytes(bytes(KIB))
    (runs / OLD / "data" / "link.shard").symlink_to(outside)
    (runs / ("e" * 32)).symlink_to(runs.parent)
    room = Room(runs, OWN, lambda: math.inf)
    await fetched(room, runs, "c.shard", 10)
    assert not half.exists()
    make_room(runs, OWN, math.inf)
    assert outside.exists()
    assert taken(runs.parent / "no such folder") == 0


def test_whether_there_would_be_room_removes_nothing(runs: Path) -> None:
    """What others fetched would go (17 KiB); their logs, what is ours and what was made here stay."""
    before = left(runs)
    stay = taken(runs) - 17 * KIB
    check_room(runs, OWN, KIB, stay + KIB)
    with pytest.raises(LocalError, match="HP-DISK-005") as caught:
        check_room(runs, OWN, KIB, stay + KIB - 1)
    assert caught.value.exit_code == ExitCode.TOO_SMALL
    assert left(runs) == before


async def test_a_file_that_arrives_during_a_count_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the folder would hold one file more than its limit."""
    runs = tmp_path / "runs"
    own = run(runs, OWN, 300.0, {"events.jsonl": 2 * KIB})
    room = Room(runs, OWN, lambda: 3 * KIB)
    counting, arrived = threading.Event(), threading.Event()

    def slow(folder: Path) -> int:
        found = taken(folder)
        counting.set()
        arrived.wait(10)
        return found

    async def fetch(name: str, nbytes: int) -> None:
        async with room.for_file(nbytes):
            (own / name).write_bytes(bytes(nbytes))

    async with room.for_file(KIB):
        (own / "events.jsonl").unlink()
        monkeypatch.setattr(disk_room, "taken", slow)
        second = asyncio.create_task(fetch("second", KIB))
        await asyncio.to_thread(counting.wait, 10)
        (own / "first").write_bytes(bytes(KIB))
    arrived.set()
    await second
    with pytest.raises(LocalError, match="HP-DISK-005"):
        await fetch("third", 2 * KIB)
    assert taken(runs) == 2 * KIB
