"""A checkpoint is complete, verified and whole on the disk, or it does not exist."""

import multiprocessing
import os
import resource
import signal
import sys
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_log import Log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import (
    CheckpointStore,
    best_of,
    initial_record,
    record_of,
    thinned,
)
from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.dht.base.file_pieces import read
from hetpeer.stages.block import block_state, state_file
from hetpeer.stages.block.block_state import BlockState
from tests.amounts import mostly_proof
from tests.bootstrap.engine import keep_state

KEPT = ("exp_avg", "exp_avg_sq")


def make_state(store: CheckpointStore, block: int, version: int) -> BlockState:
    count = block_state.element_count(store._layouts[block])
    values = np.random.default_rng(version).random((3, count), np.float32)
    return BlockState(
        version=version, parameters=values[0], optimizer=dict(zip(KEPT, values[1:], strict=True))
    )


def put(store: CheckpointStore, block: int, version: int) -> str:
    current = make_state(store, block, version)
    keep_state(
        store, version, block, state_file.dump(current, block, store._layouts[block]), current.digest()
    )
    return current.digest()


def _content(store: CheckpointStore, record: dict, block: int) -> bytearray:
    part = store.open(record, block)
    return read(part, 0, part.nbytes)


def make_checkpoint(store: CheckpointStore, version: int) -> dict:
    store.begin(version)
    for block in range(len(store._layouts)):
        put(store, block, version)
    return dict(store.seal(version))


@pytest.fixture
def store(fresh: RunDirectory) -> CheckpointStore:
    return CheckpointStore(fresh, fresh.layouts())


def test_sealed_checkpoint_is_loaded_again(store: CheckpointStore) -> None:
    record = make_checkpoint(store, 10)
    assert (record["kind"], record["version"]) == ("checkpoint", 10)
    for block, digest in enumerate(record["blocks"]):
        assert digest == make_state(store, block, 10).digest()
        assert store.load_state(record, block).digest() == digest
        assert (
            state_file.load(_content(store, record, block), block, store._layouts[block], KEPT).version == 10
        )


def test_initial_state_is_version_0(store: CheckpointStore, fresh: RunDirectory) -> None:
    record = initial_record(fresh.manifest)
    for block in range(len(fresh.manifest.blocks)):
        loaded = store.load_state(record, block)
        assert loaded.version == 0
        assert not loaded.optimizer


def test_incomplete_checkpoint_cannot_be_sealed(store: CheckpointStore) -> None:
    store.begin(10)
    put(store, 0, 10)
    with pytest.raises(ValueError, match="lacks blocks"):
        store.seal(10)
    make_checkpoint(store, 20)
    with pytest.raises(ValueError, match="not 10"):
        put(store, 0, 10)


def test_another_state_than_agreed_is_refused(store: CheckpointStore) -> None:
    store.begin(10)
    current = make_state(store, 0, 10)
    data = state_file.dump(current, 0, store._layouts[0])
    with pytest.raises(ProtocolError, match="agreed"):
        keep_state(store, 10, 0, data, "00" * 32)
    with pytest.raises(ProtocolError):
        keep_state(store, 10, 0, data[:-1], current.digest())
    older = make_state(store, 0, 9)
    with pytest.raises(ProtocolError, match="agreed"):
        keep_state(store, 10, 0, state_file.dump(older, 0, store._layouts[0]), older.digest())
    with pytest.raises(ValueError, match="lacks"):
        store.seal(10)


def test_damaged_checkpoint_is_refused(store: CheckpointStore, fresh: RunDirectory) -> None:
    record = make_checkpoint(store, 10)
    path = next(path for path in fresh.checkpoints.iterdir() if "block-000" in path.name)
    data = path.read_bytes()
    flips = [*range(400), *np.linspace(400, len(data) - 1, 600, dtype=int).tolist()]
    for position in flips:
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(LocalError) as caught:
            store.open(record, 0)
        assert caught.value.code == "HP-CKPT-001"
    for length in range(0, len(data), 1999):
        path.write_bytes(data[:length])
        with pytest.raises(LocalError, match="HP-CKPT-001"):
            store.open(record, 0)
    path.unlink()
    with pytest.raises(LocalError, match="HP-CKPT-001"):
        store.open(record, 0)


@pytest.mark.parametrize("deaths", mostly_proof([20, 200], [20]))
def test_the_writer_may_be_killed_anywhere(store: CheckpointStore, fresh: RunDirectory, deaths: int) -> None:
    """SIGKILL at calls into C, from a checkpoint's first byte to its record in the log: the old or the new
    one loads.
    """
    older = make_checkpoint(store, 10)
    with closing(Log.open(fresh.log_path)) as log:
        log.append(older)
    before = fresh.log_path.read_bytes()
    calls = write_and_die(store, fresh, at=0)
    found = []
    for at in np.linspace(1, calls, deaths, dtype=int).tolist():
        fresh.log_path.write_bytes(before)
        write_and_die(store, fresh, at)
        with closing(Log.open(fresh.log_path)) as log:
            records = list(log)
        found.append(records[-1]["version"])
        again = CheckpointStore(fresh, store._layouts)
        for block in range(len(store._layouts)):
            assert again.load_state(records[-1], block).version == found[-1]
        again.prune(records)
        assert len(list(fresh.checkpoints.iterdir())) == len(store._layouts) * len(records)
        for path in fresh.checkpoints.glob("v00000020*"):
            path.unlink()
    assert found == sorted(found)
    assert set(found) == {10, 20}


def write_and_die(store: CheckpointStore, run: RunDirectory, at: int) -> int:
    """Checkpoint 20 and its record, in a child that is killed at call `at` into C; how many there were if
    it is 0.
    """
    counted = multiprocessing.RawValue("i", 0)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if at else 0)
        return counted.value

    def count(_frame, event: str, _function) -> None:
        if event == "c_call":
            counted.value += 1
            if counted.value == at:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.setprofile(count)
        record = make_checkpoint(store, 20)
        with closing(Log.open(run.log_path)) as log:
            log.append(record)
        sys.setprofile(None)
    finally:
        os._exit(0)


def test_full_disk_leaves_older_checkpoints_alone(store: CheckpointStore, fresh: RunDirectory) -> None:
    record = make_checkpoint(store, 10)
    before = sorted(fresh.checkpoints.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(LocalError) as caught:
            make_checkpoint(store, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.code == "HP-DISK-002"
    assert sorted(fresh.checkpoints.iterdir()) == before
    store.open(record, 0)


def test_prune_keeps_the_newest_and_the_one_being_made(store: CheckpointStore, fresh: RunDirectory) -> None:
    records = [make_checkpoint(store, version) for version in (10, 20, 30)]
    (fresh.checkpoints / ".torn.tmp").write_bytes(b"left by a crash")
    store.begin(40)
    put(store, 0, 40)
    store.prune(records[-2:])
    versions = {path.name[:9] for path in fresh.checkpoints.iterdir()}
    assert versions == {"v00000020", "v00000030", "v00000040"}
    store.open(records[1], 0)
    with pytest.raises(LocalError, match="HP-CKPT-001"):
        store.open(records[0], 0)


def test_what_is_here_already_is_a_part_of_the_checkpoint(
    store: CheckpointStore, fresh: RunDirectory
) -> None:
    """As of one that broke off."""
    digests = [make_state(store, block, 10).digest() for block in range(len(store._layouts))]
    store.begin(10)
    put(store, 0, 10)
    store.begin(10)
    assert [store.has_kept(10, block, digest) for block, digest in enumerate(digests)][:2] == [True, False]
    store.prune([])
    assert len(list(fresh.checkpoints.iterdir())) == 1
    for block in range(1, len(digests)):
        put(store, block, 10)
    assert store.seal(10)["blocks"] == digests


def test_made_again_after_a_rollback(store: CheckpointStore) -> None:
    first, again = make_checkpoint(store, 10), make_checkpoint(store, 10)
    assert first == again
    store.open(first, 0)


def test_older_checkpoints_that_are_kept_are_spread_evenly() -> None:
    kept: list[Record] = []
    for version in range(10, 1010, 10):
        kept = thinned([*kept, record_of(version, [f"{version}"])], 8, 2)
    versions = [record["version"] for record in kept]
    assert versions[-2:] == [990, 1000]
    assert len(versions) == 8
    gaps = [later - earlier for earlier, later in pairwise([0, *versions[:-1]])]
    assert max(gaps) <= 4 * min(gaps[:-1])


def test_the_best_one_stays_however_many_come_later() -> None:
    losses = {0: 0.5, 10: 3.0, 20: 1.0, 25: 0.7, 30: 2.0, 40: 1.0}
    kept: list[Record] = []
    for version in range(10, 200, 10):
        kept.append(record_of(version, [f"{version}"]))
        best = best_of(kept, losses)
        kept = thinned(kept, 2, 2, best)
        assert [record["version"] for record in kept[-2:]] == [*range(max(10, version - 10), version + 1, 10)]
    assert [record["version"] for record in kept] == [20, 180, 190]
    assert best_of(kept, {}) is None
    assert best_of([record_of(0, ["a"])], losses) is None, "the initial state is none"
    again = record_of(20, ["collected again after a roll-back"])
    assert best_of([*kept, again], losses) is again
