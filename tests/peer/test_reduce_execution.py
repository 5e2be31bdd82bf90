"""Sums of a reduce in the arena: they land in one vector, and tied parameters are added there if nobody else
needs what they are added to.
"""

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
from hetpeer.peer.transport.tensor_store import TensorStore, WorkerPosts
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.nameless_file import DiskShare
from tests.stages.compute_rig import cpu_engine, submitter

STEP = e.StepId(TermView(term=1, view=0), 3)
SIZE, SHARDS = 3000, (0, 1000, 3000)
FIRST, LAST = (0, 100, 900), (5, 0, 800)
"""Uses of the tied parameter: elements 100 to 900 of block 0, 0 to 800 of block 5."""


class Rig:
    """The worker's side of a place, with an engine in this process; what it tells the core is in `told`."""

    def __init__(self, arena, *, block=0, place=(0, 1), spot_checks=0.0):
        self.arena = arena
        self.store = TensorStore(arena, SpillFile(Path(), DiskShare(0)))
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
                    ties=Ties((Tie(uses=(FIRST, LAST)),)),
                ),
            ),
            SimpleNamespace(),
        )

    def sums(self, block, values, borders):
        """Sums of a block that have come from their reducers, shard by shard, and landed."""
        handles = []
        for index, (begin, end) in enumerate(pairwise(borders)):
            handle = self.store.put(STEP, memoryview(values[begin:end]).cast("B"))
            shard = e.Shard(1, block, index, begin, end, "them")
            self.reduces.land(STEP, e.Land(shard, handle, borders[0], borders[-1]))
            handles.append(handle)
        return tuple(handles)

    def floats(self, tensor):
        return np.frombuffer(self.store.view(tensor), np.float32).copy()

    async def gradient(self, own, other, **work):
        """The gradient that is inspected."""
        tied = {5 - self.block: e.TiedPiece(0, other)}
        await self.reduces.inspect(STEP, e.Inspect(1, self.block, own, tied, **work))
        ((_, _, vote, gradient, _),) = self.told
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


@pytest.mark.parametrize("block", [0, 5])
async def test_sums_land_in_one_vector_and_tied_ones_are_added_there(arena, block):
    rig = Rig(arena, block=block, place=(block, block + 1))
    own, other = drawn(1), drawn(2)
    handles = rig.sums(block, own, SHARDS)
    vector = 4 * SIZE
    assert vector <= arena.used < vector + 200, "nothing is left of what they came in"
    observed = rig.sums(5 - block, other, (0, 500, SIZE))
    used = arena.used
    gradient = await rig.gradient(handles, observed)
    assert np.array_equal(rig.floats(gradient), total(own, other, block))
    assert arena.used == used, "no further vector"
    rig.store.release_all([*handles, *observed])
    assert vector <= arena.used < vector + 200, "the gradient is there until it is released"
    rig.store.end_step(STEP)
    rig.reduces.end_step(STEP)
    assert arena.used == 0


@pytest.mark.parametrize(
    ("rig", "borders", "work"),
    [
        ({"spot_checks": 0.1}, SHARDS, {}),
        ({}, SHARDS, {"closely": True}),
        ({"place": (0, 6)}, SHARDS, {}),
        ({}, (0, SIZE), {}),
    ],
    ids=["proofs", "looked at closely", "the other block is ours", "one shard that may be on its way"],
)
async def test_sums_that_somebody_may_still_need_are_left_as_they_came(arena, rig, borders, work):
    one, own, other = Rig(arena, **rig), drawn(1), drawn(2)
    handles = one.sums(0, own, borders)
    observed = one.sums(5, other, (0, 500, SIZE))
    gradient = await one.gradient(handles, observed, **work)
    assert np.array_equal(one.floats(gradient), total(own, other, 0))
    assert np.array_equal(np.concatenate([one.floats(handle) for handle in handles]), own)


async def test_a_plan_that_is_void_leaves_nothing(arena):
    rig = Rig(arena)
    rig.store.release_all(rig.sums(0, drawn(1), SHARDS))
    assert arena.used == 0
