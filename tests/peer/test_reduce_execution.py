"""Sums of a reduce in the arena: they land in one vector, and those of tied parameters are added there as
they arrive if nobody else needs what they are added to.
"""

import mmap
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hetpeer.averaging import effects as e
from hetpeer.averaging.messages import TermView
from hetpeer.averaging.reduce.tied_parameters import Tie, Ties
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.training.reduce_execution import ReduceExecution
from hetpeer.peer.transport.spill_file import SpillFile
from hetpeer.peer.transport.tensor_store import TensorStore
from hetpeer.peer.transport.worker_posts import WorkerPosts
from hetpeer.stages.ipc.arena import ALIGNMENT, Arena
from hetpeer.stages.ipc.nameless_file import DiskShare
from tests.stages.compute_rig import cpu_engine, submitter

STEP = e.StepId(TermView(term=1, view=0), 3)
SIZE, SHARDS = 3000, (0, 1000, 3000)
FIRST, LAST = (0, 100, 900), (5, 0, 800)
"""Uses of the tied parameter: elements 100 to 900 of block 0, 0 to 800 of block 5."""


class Rig:
    """The worker's side of a place, with an engine in this process; what it tells the core is in `told`."""

    def __init__(self, arena, *, block=0, place=(0, 1), spot_checks=0.0, uses=(FIRST, LAST), spill=None):
        self.arena = arena
        self.store = TensorStore(arena, spill or SpillFile(Path(), DiskShare(0)))
        self.told = []
        submit = submitter(cpu_engine(arena))
        work = SimpleNamespace(inspected=lambda *said: self.told.append(said))
        self.block = block
        self.reduces = ReduceExecution(
            SimpleNamespace(
                me="me",
                member=SimpleNamespace(place=place, work=work),
                posts=WorkerPosts(SimpleNamespace(post=submit, arena=arena), self.store, Trace(None)),
                book=SimpleNamespace(computed=lambda *_: None),
                perform=lambda _effects: None,
                schema=SimpleNamespace(
                    links=SimpleNamespace(reduce="none", feedback=False),
                    trust=SimpleNamespace(spot_checks=spot_checks),
                    training=SimpleNamespace(groups=()),
                    elements=lambda _block: SIZE,
                    specs={block: SimpleNamespace(parameter_count=SIZE, parameter_specs={})},
                    ties=Ties((Tie(uses=uses),)),
                    holds=lambda one: place[0] <= one < place[1],
                ),
            ),
            SimpleNamespace(),
        )

    def sums(self, block, values, borders, *, plan=1, closely=False):
        """Sums of a block that have come from their reducers, shard by shard, and landed."""
        handles = []
        for index, (begin, end) in enumerate(pairwise(borders)):
            handle = self.store.put(STEP, memoryview(values[begin:end]).cast("B"))
            shard = e.Shard(plan, block, index, begin, end, "them")
            self.reduces.land(STEP, e.Land(shard, handle, borders[0], borders[-1], closely))
            handles.append(handle)
        return tuple(handles)

    def floats(self, tensor):
        return np.frombuffer(self.store.view(tensor), np.float32).copy()

    async def gradient(self, own, other, block=None, **work):
        """The gradient that is inspected."""
        block = self.block if block is None else block
        tied = {5 - block: e.TiedPiece(0, other)}
        await self.reduces.inspect(STEP, e.Inspect(1, block, own, tied, **work))
        _, _, vote, gradient, _ = self.told.pop()
        assert vote.finite
        return gradient


@pytest.fixture
def arena():
    made = Arena(1 << 20)
    yield made
    made.close()


def drawn(seed, size=SIZE):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def total(own, other, block):
    """What the update of `block` gets: the uses added in the order of the blocks."""
    _, begin, end = LAST if block else FIRST
    _, first, last = FIRST if block else LAST
    found = own.copy()
    found[begin:end] = own[begin:end] + other[first:last]
    return found


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize("borders", [SHARDS, (0, SIZE)])
@pytest.mark.parametrize("block", [0, 5])
async def test_sums_land_in_one_vector_and_tied_ones_are_added_there(arena, block, borders, own_first):
    rig = Rig(arena, block=block, place=(block, block + 1))
    own, other = drawn(1), drawn(2)
    vector = 4 * SIZE
    arriving = [lambda: rig.sums(block, own, borders), lambda: rig.sums(5 - block, other, (0, 500, SIZE))]
    landed = []
    for arrives in arriving if own_first else arriving[::-1]:
        landed.append(arrives())
        assert vector <= arena.used < vector + 200, "nothing is left of what they came in"
    handles, observed = landed if own_first else landed[::-1]
    gradient = await rig.gradient(handles, observed)
    assert np.array_equal(rig.floats(gradient), total(own, other, block))
    assert vector <= arena.used < vector + 200, "no further vector"
    rig.store.release_all([*handles, *observed])
    assert vector <= arena.used < vector + 200, "the gradient is there until it is released"
    rig.store.end_step(STEP)
    rig.reduces.end_step(STEP)
    assert arena.used == 0


async def test_a_sum_counts_for_no_limit_of_bundles_and_its_pages_go_with_it(arena, tmp_path):
    rig = Rig(arena, spill=SpillFile(tmp_path, DiskShare(1 << 20)))
    rig.store.keep_within(4 * SIZE + 2 * ALIGNMENT)  # for a shard and the bundle, and no vector
    kept = rig.store.put(STEP, memoryview(b"12345678"))
    rig.store._kept[kept] = None
    handles = rig.sums(0, drawn(1), (0, SIZE))
    assert kept.parked is None
    before = os.fstat(arena.fd).st_blocks * 512
    rig.store.release_all([kept, *handles])
    assert os.fstat(arena.fd).st_blocks * 512 <= before - 2 * mmap.PAGESIZE
    assert arena.used == 0
    rig.store.close()


async def test_of_two_tied_blocks_that_are_ours_each_gets_both_sums(arena):
    rig, own, other = Rig(arena, place=(0, 6)), drawn(1), drawn(2)
    landed = {0: rig.sums(0, own, SHARDS), 5: rig.sums(5, other, (0, 500, SIZE))}
    gradient = await rig.gradient(landed[0], landed[5], block=0)
    assert np.array_equal(rig.floats(gradient), total(own, other, 0))
    rig.reduces._schema.specs[5] = rig.reduces._schema.specs[0]
    gradient = await rig.gradient(landed[5], landed[0], block=5)
    assert np.array_equal(rig.floats(gradient), total(other, own, 5))


@pytest.mark.parametrize(
    ("rig", "borders", "work"),
    [
        ({"spot_checks": 0.1}, SHARDS, {}),
        ({}, SHARDS, {"closely": True}),
        ({"spot_checks": 0.1}, (0, SIZE), {}),
    ],
    ids=["proofs", "looked at closely", "one shard that may be on its way"],
)
async def test_sums_that_somebody_may_still_need_are_left_as_they_came(arena, rig, borders, work):
    one, own, other = Rig(arena, **rig), drawn(1), drawn(2)
    handles = one.sums(0, own, borders, **work)
    observed = one.sums(5, other, (0, 500, SIZE), **work)
    gradient = await one.gradient(handles, observed, **work)
    assert np.array_equal(one.floats(gradient), total(own, other, 0))
    assert np.array_equal(np.concatenate([one.floats(handle) for handle in handles]), own)


async def test_three_uses_are_added_in_the_order_of_the_blocks_whatever_comes_first(arena):
    """Rounding tells: (1 + 2^24) - 2^24 is 0 in float32, 1 + (2^24 - 2^24) is 1."""
    rig = Rig(arena, uses=(FIRST, (3, 100, 900), LAST))
    first, second, third = (np.full(SIZE, value, np.float32) for value in (1.0, 2.0**24, -(2.0**24)))
    late, later = rig.sums(5, third, (0, SIZE)), rig.sums(3, second, (0, SIZE))
    handles = rig.sums(0, first, SHARDS)
    tied = {3: e.TiedPiece(0, later), 5: e.TiedPiece(0, late)}
    await rig.reduces.inspect(STEP, e.Inspect(1, 0, handles, tied))
    _, _, _, gradient, _ = rig.told.pop()
    assert set(rig.floats(gradient)[100:900]) == {0.0}


async def test_a_plan_that_is_void_leaves_nothing(arena):
    rig, vector = Rig(arena), 4 * SIZE
    rig.store.release_all(rig.sums(0, drawn(1), SHARDS))
    assert arena.used == 0
    handles = rig.sums(0, drawn(3), SHARDS, plan=2)
    assert vector <= arena.used < vector + 200
    assert np.array_equal(np.concatenate([rig.floats(handle) for handle in handles]), drawn(3))
    rig.store.end_step(STEP)
    rig.reduces.end_step(STEP)
    assert arena.used == 0
