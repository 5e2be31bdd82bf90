"""What does not fit into memory waits on the disk, bit for bit; what is in use stays where it is."""

import logging
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.messages import TermView
from hetpeer.dht.base.file_pieces import OpenFile
from hetpeer.peer.transport.spill_file import SpillFile
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.stages.ipc.arena import Arena, ArenaFullError
from hetpeer.stages.ipc.nameless_file import DiskShare

STEP = StepId(TermView(term=1, view=0), 0)
SIZE = 64 << 10
ROOM = 4
"""Tensors that the arena holds."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(ROOM * SIZE)
    yield arena
    arena.close()


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFile]:
    spill = SpillFile(tmp_path, DiskShare(8 * SIZE))
    yield spill
    spill.close()


@pytest.fixture
def store(arena: Arena, spill: SpillFile) -> TensorStore:
    return TensorStore(arena, spill)


def filled(store: TensorStore, value: int, *, kept: bool = True) -> Tensor:
    tensor = store.new(STEP, SIZE, kept=kept)
    store.view(tensor)[:] = bytes([value]) * SIZE
    return tensor


def test_the_oldest_that_is_kept_makes_room_and_comes_back(store: TensorStore, spill: SpillFile) -> None:
    tensors = [filled(store, value) for value in range(ROOM + 2)]
    assert [t.parked is not None for t in tensors] == [True, True, *[False] * ROOM]
    store.bring_back(tensors[0])
    assert tensors[0].parked is None
    assert tensors[2].parked is not None
    assert bytes(store.view(tensors[0])) == bytes(SIZE)
    store.bring_back(tensors[1])
    assert bytes(store.view(tensors[1])) == bytes([1]) * SIZE
    assert spill.used == 2 * SIZE


def test_what_is_in_use_stays_in_the_arena(store: TensorStore) -> None:
    pinned, flying, shared, passing = (filled(store, n, kept=n < 3) for n in range(ROOM))
    held = store.pin([pinned])
    arrived = store.leaves(flying)
    other = store.share(shared)
    with pytest.raises(ArenaFullError):
        store.new(STEP, SIZE)
    assert not any(t.parked for t in (pinned, flying, shared, passing))
    arrived()
    store.new(STEP, SIZE)
    assert flying.parked is not None
    store.unpin(held)
    store.new(STEP, SIZE)
    assert pinned.parked is not None
    store.release(other)
    store.new(STEP, SIZE)
    assert shared.parked is not None


def test_what_nobody_needs_after_its_arrival_is_freed_then(store: TensorStore, arena: Arena) -> None:
    tensor = store.new(STEP, SIZE)
    tensor.once = True
    first, second = store.leaves(tensor), store.leaves(tensor)
    first()
    assert not tensor.released
    second()
    assert tensor.released
    assert arena.used == 0


def test_the_disk_gets_everything_back(store: TensorStore, spill: SpillFile, arena: Arena) -> None:
    tensors = [filled(store, value) for value in range(ROOM + 3)]
    assert spill._file.file.nbytes > 0
    store.release(tensors[0])
    assert spill.used == 2 * SIZE
    store.end_step(STEP)
    assert (spill.used, arena.used) == (0, 0)
    assert spill._file.file.nbytes == 0


def test_nothing_has_a_name(store: TensorStore, tmp_path: Path) -> None:
    for value in range(ROOM + 1):
        filled(store, value)
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_kept(arena: Arena, tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, DiskShare(2 * SIZE))
    store = TensorStore(arena, spill)
    tensors = [filled(store, value) for value in range(ROOM + 2)]
    for _ in range(2):
        with pytest.raises(ArenaFullError):
            store.new(STEP, SIZE)
    assert spill.refusal == "the limit of 0 MiB is reached"
    assert [bytes(store.view(t))[0] for t in tensors[2:]] == [2, 3, 4, 5]
    spill.close()


def test_the_owners_limit_comes_before_the_arenas(store: TensorStore, spill: SpillFile, arena: Arena) -> None:
    """What is kept goes once it is reached, the oldest first; what is in use stays, and nobody waits for
    it.
    """
    store.keep_within(2 * SIZE)
    tensors = [filled(store, value) for value in range(4)]
    assert [t.parked is not None for t in tensors] == [True, True, False, False]
    store.bring_back(tensors[0])
    assert [t.parked is not None for t in tensors] == [False, True, True, False]
    held = store.pin([tensors[0], tensors[3]])
    passing = filled(store, 9, kept=False)
    assert arena.used == 3 * SIZE, "nothing could go"
    store.unpin(held)
    store.release(passing)
    store.keep_within(arena.capacity)
    store.bring_back(tensors[1])
    store.bring_back(tensors[2])
    assert [bytes(store.view(t))[0] for t in tensors] == [0, 1, 2, 3]
    assert (arena.used, spill.used) == (4 * SIZE, 0)


@pytest.mark.parametrize("limit", [0, SIZE // 2, SIZE])
def test_a_limit_that_nothing_fits_into_stops_nobody(store: TensorStore, arena: Arena, limit: int) -> None:
    store.keep_within(limit)
    for value in range(6):
        filled(store, value)
        assert arena.used == SIZE


def test_without_a_disk_the_owners_limit_is_not_kept(arena: Arena, tmp_path: Path) -> None:
    """But the arena's is: the protocol goes on."""
    store = TensorStore(arena, SpillFile(tmp_path, DiskShare(0)))
    store.keep_within(SIZE)
    for value in range(ROOM):
        filled(store, value)
    with pytest.raises(ArenaFullError):
        filled(store, ROOM)


def test_a_full_disk_leaves_everything_as_it_was(arena: Arena) -> None:
    spill = SpillFile(Path("/dev"), DiskShare(100 * SIZE))
    spill._file._file = OpenFile(os.open("/dev/full", os.O_RDWR))
    store = TensorStore(arena, spill)
    tensors = [filled(store, value) for value in range(ROOM)]
    with pytest.raises(ArenaFullError):
        store.new(STEP, SIZE)
    assert spill.refusal == "No space left on device"
    assert [bytes(store.view(t))[0] for t in tensors] == [0, 1, 2, 3]
    assert spill.used == 0
    spill.close()


def test_a_full_disk_is_told_once_and_gets_back_what_did_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step after step the last bundles do not fit: others need the rest of the disk for their files."""
    spill = SpillFile(tmp_path, DiskShare(100 * SIZE))
    bundle = memoryview(bytes(SIZE))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE + SIZE // 2, hard))
    try:
        for _ in range(3):
            place = spill.put(bundle)
            assert place is not None
            assert spill.put(bundle) is None
            assert spill._file.file.nbytes == SIZE, "no half of a bundle is left"
            spill.drop(place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        spill.close()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == ["memory is full, and so is what there is of the disk: File too large"]


def test_any_order_keeps_every_bit(store: TensorStore, spill: SpillFile, arena: Arena) -> None:
    chance = random.Random(7)
    live: dict[Tensor, int] = {}
    for number in range(400):
        action = chance.random()
        if action < 0.5 and len(live) < 10:
            live[filled(store, number % 251)] = number % 251
        elif live:
            tensor = chance.choice(list(live))
            if action < 0.8:
                store.bring_back(tensor)
                assert bytes(store.view(tensor)) == bytes([live[tensor]]) * SIZE
            else:
                store.release(tensor)
                del live[tensor]
    for tensor in live:
        store.release(tensor)
    assert (spill.used, arena.used) == (0, 0)
