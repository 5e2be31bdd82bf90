"""The arena against a model that remembers every extent and what was written to it."""

import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.ipc.arena import (
    ALIGNMENT,
    Arena,
    ArenaFullError,
    Extent,
    FreeList,
    SharedMemory,
)
from tests.amounts import examples

CAPACITY = 16 * mmap.PAGESIZE


class ArenaMachine(RuleBasedStateMachine):
    """Allocations never overlap, keep their content, and a fresh mapping of the descriptor sees the same
    bytes.
    """

    extents = Bundle("extents")

    def __init__(self):
        super().__init__()
        self.arena = Arena(CAPACITY)
        self.content: dict[Extent, bytes] = {}

    @rule(target=extents, nbytes=st.integers(0, CAPACITY // 3), fill=st.integers(0, 255))
    def allocate(self, nbytes, fill):
        try:
            extent = self.arena.allocate(nbytes)
        except ArenaFullError:
            assert all(end - begin < max(nbytes, 1) for begin, end in self.gaps())
            return Extent(-1, 0)
        assert extent.nbytes == nbytes
        assert extent.offset % ALIGNMENT == 0
        self.content[extent] = bytes([fill]) * nbytes
        self.arena.view(extent)[:] = self.content[extent]
        return extent

    @rule(extent=consumes(extents))
    def release(self, extent):
        if extent not in self.content:  # what a full arena answered
            with pytest.raises(ValueError, match="not allocated"):
                self.arena.release(extent)
            return
        del self.content[extent]
        self.arena.release(extent)
        with pytest.raises(ValueError, match="not allocated"):
            self.arena.release(extent)

    def gaps(self):
        """Free ranges by the model: between the rounded-up ends of the extents."""
        end = 0
        for extent in sorted(self.content, key=lambda extent: extent.offset):
            yield end, extent.offset
            end = extent.offset + -(-max(extent.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        yield end, CAPACITY

    @invariant()
    def free_list_is_the_complement(self):
        gaps = list(self.gaps())
        assert all(begin <= end for begin, end in gaps), "extents overlap"
        assert self.arena._free.ranges() == [gap for gap in gaps if gap[0] < gap[1]]
        assert self.arena.used == CAPACITY - sum(end - begin for begin, end in gaps)

    @invariant()
    def content_is_kept(self):
        for extent, content in self.content.items():
            assert self.arena.view(extent) == content

    def teardown(self):
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = examples(60, stateful_step_count=40)


def test_full_arena_says_what_is_used():
    arena = Arena(1 << 20)
    arena.allocate(700_000)
    with pytest.raises(ArenaFullError) as caught:
        arena.allocate(400_000)
    assert caught.value.line().startswith("HP-MEM-001: no room for 0.4 MiB")
    assert "0.7 MiB of 1.0 MiB are in use and the largest free piece has 0.3 MiB" in caught.value.line()
    arena.close()


def test_free_list_joins_both_neighbours():
    free = FreeList(300)
    offsets = [free.take(100) for _ in range(3)]
    assert offsets == [0, 100, 200]
    assert free.take(1) is None
    free.give(0, 100)
    free.give(200, 100)
    assert free.ranges() == [(0, 100), (200, 300)]
    free.give(100, 100)
    assert free.ranges() == [(0, 300)]
    assert free.largest == 300


def test_released_pages_stay_until_they_are_trimmed():
    arena = Arena(8 << 20)
    before, big, after = (arena.allocate(size) for size in (100, 4 << 20, 100))
    for extent in (before, big, after):
        arena.view(extent)[:] = b"x" * extent.nbytes
    arena.release(big)
    assert os.fstat(arena.fd).st_blocks * 512 >= big.nbytes
    arena.trim()
    assert os.fstat(arena.fd).st_blocks * 512 <= 2 * mmap.PAGESIZE
    assert arena.view(before) == b"x" * 100
    assert arena.view(after) == b"x" * 100
    arena.close()


def test_what_its_pages_take_is_never_more_than_it_says():
    arena, draws, extents = Arena(8 << 20), random.Random(5), []
    for _ in range(400):
        if extents and draws.random() < 0.5:
            arena.release(extents.pop(draws.randrange(len(extents))), pages=draws.random() < 0.3)
        elif arena.used < 4 << 20:
            extents.append(arena.allocate(draws.randrange(1, 200_000)))
            arena.view(extents[-1])[:] = b"x" * extents[-1].nbytes
        if draws.random() < 0.05:
            arena.trim()
        ends = 2 * mmap.PAGESIZE * 400
        assert arena.used <= arena.held
        assert os.fstat(arena.fd).st_blocks * 512 <= arena.held + ends
    arena.close()


def test_pages_of_a_large_extent_can_go_with_it():
    arena = Arena(8 << 20)
    big = arena.allocate(4 << 20)
    arena.view(big)[:] = b"x" * big.nbytes
    arena.release(big, pages=True)
    assert arena.held == 0
    assert os.fstat(arena.fd).st_blocks == 0
    arena.close()


def test_trim_leaves_an_arena_that_is_full_or_was_never_used():
    arena = Arena(mmap.PAGESIZE)
    arena.trim()
    whole = arena.allocate(mmap.PAGESIZE)
    arena.view(whole)[:] = b"x" * mmap.PAGESIZE
    arena.trim()
    assert arena.view(whole) == b"x" * mmap.PAGESIZE
    arena.close()


def test_a_child_maps_the_same_bytes_and_cannot_shrink_them():
    arena = Arena(1 << 16)
    extent = arena.allocate(5)
    arena.view(extent)[:] = b"hello"
    child = (
        "import os, sys\n"
        "from hetpeer.stages.ipc.arena import Extent, SharedMemory\n"
        f"memory = SharedMemory({arena.fd})\n"
        f"view = memory.view(Extent({extent.offset}, 5))\n"
        "assert view == b'hello', bytes(view)\n"
        "view[:] = b'there'\n"
        "try:\n"
        f"    os.ftruncate({arena.fd}, 0)\n"
        "except PermissionError:\n"
        "    sys.exit(7)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", child], pass_fds=[arena.fd], timeout=120, check=False, env=environment
    )
    assert done.returncode == 7
    assert arena.view(extent) == b"there"
    arena.close()


def test_views_stay_inside_and_outlive_close():
    arena = Arena(mmap.PAGESIZE)
    for extent in (Extent(-1, 2), Extent(0, -1), Extent(mmap.PAGESIZE - 1, 2)):
        with pytest.raises(ValueError, match="outside"):
            arena.view(extent)
    held = SharedMemory(os.dup(arena.fd))
    view = held.view(Extent(0, 4))
    view[:] = b"kept"
    held.close()
    arena.close()
    assert view == b"kept"


def test_no_shared_memory_is_said_and_leaves_no_descriptor():
    """More than there is address space for; a sandbox that forbids it ends the same way."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(LocalError, match="HP-SYS-004"):
        Arena(1 << 60)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
