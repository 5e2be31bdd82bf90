"""The engine without a process: microbatches, slots and sums, and that a command which is refused changes
nothing.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetpeer.stages.block.fingerprint import fingerprint, unpack
from hetpeer.stages.graph.block_spec import OperatorCall
from hetpeer.stages.graph.block_wire import pack_block, read_block
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.worker import vector_sums
from tests.stages.compute_rig import (
    DRAW,
    KEPT,
    MODEL,
    UPDATE,
    Holder,
    backward,
    flat,
    microbatch,
    plain_gradient,
    refused,
    state_file,
    submitter,
    tiny_blocks,
)


async def test_slots_hold_sums_in_the_order_of_the_backwards(holder):
    first, second = plain_gradient(1, 0.5), plain_gradient(2, 0.5)
    await backward(holder, 1, slot=7, weight=0.5)
    await backward(holder, 2, slot=7, weight=0.5)
    for spec in holder.blocks:
        found = holder.floats(await holder.export(spec, 7))
        assert np.array_equal(found, flat(first, spec) + flat(second, spec))


async def test_only_the_blocks_asked_for_are_folded(holder):
    await backward(holder, 1, slot=0, fold=(1,))
    assert np.array_equal(
        holder.floats(await holder.export(holder.blocks[1], 0)),
        flat(plain_gradient(1, 1.0), holder.blocks[1]),
    )
    for block in (0, 2):
        with refused("HP-WORK-001", f"block {block} has no slot 0"):
            await holder.export(holder.blocks[block], 0)
    with refused("HP-WORK-001", "did not run all of the blocks"):
        await backward(holder, 1, slot=0, fold=(0, 99))


async def test_merge_drop_and_export(holder):
    spec, block = holder.blocks[0], holder.blocks[0].index
    for number in range(3):
        await backward(holder, number, slot=number)
    parts = [holder.floats(await holder.export(spec, slot)).copy() for slot in range(3)]
    await holder.submit(c.MergeSlot(step=0, block=block, source=1, target=0))
    assert np.array_equal(holder.floats(await holder.export(spec, 0)), parts[0] + parts[1])
    with refused("HP-WORK-001", "no slot 1"):
        await holder.export(spec, 1)
    await holder.submit(c.MergeSlot(step=0, block=block, source=2, target=9))  # no slot 9 yet: 2 becomes it
    assert np.array_equal(holder.floats(await holder.export(spec, 9)), parts[2])
    for _ in range(2):  # dropping what is not there is no error
        await holder.submit(c.DropSlot(step=0, block=block, slot=9))
    with refused("HP-WORK-001", "no slot 9"):
        await holder.export(spec, 9)
    with refused("HP-WORK-001", "no part"):
        await holder.submit(
            v.ExportSlot(
                step=0, block=block, slot=0, begin=0, end=spec.parameter_count + 1, extent=Extent(0, 64)
            )
        )
    await holder.submit(c.ClearStep(step=0))
    with refused("HP-WORK-001", "no slot 0"):
        await holder.export(spec, 0)


async def test_sum_adds_one_by_one_in_the_order_given(holder):
    parts = [np.array([big, 1.0], np.float32) for big in (1e8, 3.0, -1e8)]
    extents = [holder.put(part) for part in parts]
    into = holder.arena.allocate(8)
    for order in ((0, 1, 2), (0, 2, 1)):
        await holder.submit(v.SumVectors(parts=tuple(extents[i] for i in order), into=into, elements=2))
        expected = parts[order[0]]
        for i in order[1:]:
            expected = expected + parts[i]
        assert np.array_equal(holder.floats(into), expected)


async def test_a_sum_may_take_the_place_of_any_of_its_parts(holder):
    """The order of additions stays; the vectors are longer than what is added at a time."""
    drawn = np.random.default_rng(0).standard_normal((3, vector_sums.PIECE + 9))
    parts = [part.astype(np.float32) for part in drawn * [[1.0], [100.0], [1.0]]]
    expected = (parts[0] + parts[1]) + parts[2]
    assert not np.array_equal(expected, (parts[1] + parts[2]) + parts[0]), "the order matters"
    for place in range(3):
        given = tuple(map(holder.put, parts))
        await holder.submit(v.SumVectors(parts=given, into=given[place], elements=len(expected)))
        assert np.array_equal(holder.floats(given[place]), expected)
        holder.release(*given)


async def test_a_sum_names_the_parts_that_are_no_numbers(holder):
    parts = [np.array(part, np.float32) for part in ((1, 2), (np.nan, 1), (2, -np.inf), (3e38, 1), (3e38, 1))]
    extents = [holder.put(part) for part in parts]
    into = holder.arena.allocate(8)
    for chosen, unsound in (((0, 3), ()), ((0, 1, 2), (1, 2)), ((2, 0), (0,)), ((3, 4), ())):
        summed = await holder.submit(
            v.SumVectors(parts=tuple(extents[i] for i in chosen), into=into, elements=2)
        )
        assert summed.unsound == unsound


async def test_parts_are_looked_at_one_by_one_where_a_sum_is_doubted(holder):
    parts = [holder.put(np.full(3, number, np.float32)) for number in (1, 2, 1)]
    into = holder.arena.allocate(12)
    summed = await holder.submit(v.SumVectors(parts=tuple(parts), into=into, elements=3, closely=True))
    (one, _), (two, _), (like_one, _) = summed.looks
    assert one == like_one != two
    assert [finite for _, finite in summed.looks] == [True] * 3
    unasked = await holder.submit(v.SumVectors(parts=tuple(parts), into=into, elements=3))
    assert unasked.looks == ()


async def test_parts_slots_and_sums_are_fingerprinted_as_their_elements_are(holder):
    """Each in the ways that are named, whatever pieces it lies in."""
    spec, key = holder.blocks[0], bytes(range(16))
    await backward(holder, 1, slot=7)
    whole = holder.floats(await holder.export(spec, 7)).copy()
    how = v.Marking(block=spec.index, begin=5, end=len(whole) - 3, key=key)
    expected = fingerprint(whole[5:-3], spec.index, 5, key)
    slot = await holder.submit(v.MarkSlot(step=0, slot=7, marking=how))
    assert np.allclose(unpack(slot.marks), expected)
    cuts = (0, 2, 40, 60, len(whole))
    pieces = tuple(holder.put(whole[i:j].copy()) for i, j in pairwise(cuts))
    vector = await holder.submit(v.MarkVector(pieces=pieces, begin=0, marking=how))
    assert np.allclose(unpack(vector.marks), expected)
    part, begin = holder.put(whole[2:40].copy()), 2
    ways = tuple(v.Marking(block=spec.index, begin=i, end=j, key=key) for i, j in ((2, 40), (5, 33)))
    into = holder.arena.allocate(part.nbytes)
    added = await holder.submit(
        v.SumVectors(parts=(part, part), into=into, elements=38, begin=begin, markings=ways)
    )
    each = [fingerprint(whole[one.begin : one.end], spec.index, one.begin, key) for one in ways]
    assert np.allclose([unpack(one) for one in added.marks], [*each, *each])
    nothing = v.Marking(block=spec.index, begin=5, end=5, key=key)
    assert not unpack((await holder.submit(v.MarkSlot(step=0, slot=7, marking=nothing))).marks).any()
    outside = v.Marking(block=spec.index, begin=5, end=len(whole) + 1, key=key)
    for command in (
        v.MarkSlot(step=0, slot=7, marking=outside),
        v.MarkVector(pieces=pieces, begin=0, marking=outside),
        v.MarkVector(pieces=pieces[1:], begin=10, marking=how),
        v.SumVectors(parts=(part,), into=into, elements=38, begin=begin, markings=(how,)),
    ):
        with refused("HP-WORK-001", "are not among"):
            await holder.submit(command)


async def test_a_bad_number_from_a_peer_is_named_and_changes_no_slot(engine, arena):
    back = Holder(submitter(engine), arena, tiny_blocks()[1:2])
    await back.load(MODEL)
    (name, spec), *_ = back.blocks[0].inputs.items()
    good = back.put(np.full(spec.at(2).count, 0.1, np.float32))
    bad = back.put(np.full(spec.at(2).count, np.inf, np.float32))
    with refused("HP-NUM-001", f"task a, input: '{name}' is not finite"):
        await back.forward("a", 0, {name: bad})
    outputs, _, _ = await back.forward("b", 0, {name: good})
    await back.backward("b", 0, {n: back.put(np.ones(e.nbytes // 4, np.float32)) for n, e in outputs.items()})
    before = back.floats(await back.export(back.blocks[0], 0)).copy()
    outputs, _, _ = await back.forward("c", 0, {name: good})
    gradients = {n: back.put(np.full(e.nbytes // 4, np.nan, np.float32)) for n, e in outputs.items()}
    with refused("HP-NUM-001", "task c, gradient of output: .* is not finite"):
        await back.backward("c", 0, gradients)
    outputs, _, _ = await back.forward("d", 0, {name: good})
    huge = {n: back.put(np.full(e.nbytes // 4, 3e38, np.float32)) for n, e in outputs.items()}
    with refused("HP-NUM-001", "task d, gradient of block 1: .* is not finite"):
        await back.backward("d", 0, huge)
    assert np.array_equal(back.floats(await back.export(back.blocks[0], 0)), before)


class Waits(TorchDispatchMode):
    """Counts the operators that wait for a device, and hand a number to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weigh", [False, True])
async def test_a_microbatch_does_not_wait_for_the_device_once_for_each_tensor(engine, arena, weigh):
    middle = Holder(submitter(engine), arena, tiny_blocks()[1:2])
    await middle.load(MODEL)
    (name, spec), *_ = middle.blocks[0].inputs.items()
    assert len(middle.blocks[0].parameters) > 5
    given = middle.put(np.full(spec.at(2).count, 0.1, np.float32))
    with Waits() as waits:
        outputs, _, _ = await middle.forward("a", 0, {name: given})
        seeds = {n: middle.put(np.ones(e.nbytes // 4, np.float32)) for n, e in outputs.items()}
        await middle.backward("a", 0, seeds, weigh=weigh)
    assert waits.count == 0


async def test_of_several_bad_gradients_the_last_blocks_is_named_and_no_block_is_folded(engine, arena):
    pair = Holder(submitter(engine), arena, tiny_blocks()[1:3])
    await pair.load(MODEL)
    (name, spec), *_ = pair.blocks[0].inputs.items()
    good = pair.put(np.full(spec.at(2).count, 0.1, np.float32))
    outputs, _, _ = await pair.forward("a", 0, {name: good})
    huge = {n: pair.put(np.full(e.nbytes // 4, 3e38, np.float32)) for n, e in outputs.items()}
    with refused("HP-NUM-001", "task a, gradient of block 2: .* is not finite"):
        await pair.backward("a", 0, huge)
    for block in pair.blocks:
        with refused("HP-WORK-001", f"block {block.index} has no slot 0"):
            await pair.export(block, 0)


async def test_a_token_beyond_the_vocabulary_is_an_answer(holder):
    tokens = holder.put(np.full((2, 8), 9999, np.int64))
    targets = holder.put(np.zeros((2, 8), np.int64))
    data = {"tokens": tokens, "targets": targets}
    with refused("HP-WIRE-001", "embedding"):
        await holder.submit(
            c.Forward(
                step=0,
                versions=(0,) * len(holder.blocks),
                task="t",
                begin=0,
                end=len(holder.blocks),
                batch=2,
                draw=DRAW,
                data=data,
            )
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"end": 99}, "is not loaded"),
        ({"end": 0}, "runs no block"),
        ({"end": 2, "versions": (1, 0)}, "version 1 is not here, but 0"),
        ({"versions": (0,)}, "not one version for each"),
        ({"data": {}}, "data: 'targets' is only in"),
        ({"inputs": {"x": Extent(0, 4)}}, "input: 'x' is only in"),
        ({"outputs": {"loss": Extent(0, 4)}}, "output: 'loss' is only in"),
        ({"data": {"tokens": Extent(0, 8), "targets": Extent(0, 8)}}, "takes 128 bytes and its extent has 8"),
        ({"data": {"tokens": Extent(1 << 40, 128), "targets": Extent(0, 128)}}, "outside an arena"),
    ],
)
async def test_a_forward_that_does_not_fit_the_graph_is_refused(holder, change, text):
    data = {name: holder.put(tensor) for name, tensor in microbatch(0).items()}
    fields = {
        "step": 0,
        "versions": (0,) * len(holder.blocks),
        "task": "t",
        "begin": 0,
        "end": len(holder.blocks),
        "batch": 2,
        "draw": DRAW,
        "data": data,
    } | change
    with refused("HP-WORK-00[12]", text):
        await holder.submit(c.Forward(**fields))
    assert (await holder.submit(c.Info())).tasks == 0


async def test_graphs_end_with_the_backward_the_drop_and_the_block(holder):
    async def tasks():
        return (await holder.submit(c.Info())).tasks

    for task in ("a", "b", "c"):
        await holder.forward(task, 0)
    await holder.forward("evaluated", 0, train=False)
    assert await tasks() == 3
    await holder.backward("a", 0)
    await holder.submit(c.DropTask(step=0, task="b"))
    assert await tasks() == 1
    for task in ("a", "b", "evaluated", "never"):
        with refused("HP-WORK-001", f"no graph is kept of task {task}"):
            await holder.backward(task, 0)
    await holder.load_state(0, state_file(MODEL, holder.blocks[0]))
    with refused("HP-WORK-001", "no graph is kept of task c"):
        await holder.backward("c", 0)


async def test_what_is_loaded_is_checked(engine, arena):
    first, second = tiny_blocks()[:2]
    holder = Holder(submitter(engine), arena, [first])
    graph = pack_block(first)
    with refused("HP-WORK-001", "block 0 is not prepared"):
        await holder.load_state(0, b"x")
    with refused("HP-WORK-001", "says it is block 0"):
        await holder.submit(c.PrepareBlock(block=1, graph=graph, update=UPDATE, keeps=KEPT))
    with refused("HP-WIRE-001", "block"):
        await holder.submit(c.PrepareBlock(block=0, graph=graph[:-1], update=UPDATE, keeps=KEPT))
    for wrong, said in (
        (replace(first, flops_forward=first.flops_forward + 1), "FLOPs and takes"),
        (
            replace(
                first, nodes=(*first.nodes, OperatorCall(name="more", op="aten.bernoulli.default", kwargs={}))
            ),
            "is not allowed",
        ),
    ):
        packed = pack_block(wrong)
        assert read_block(packed) == wrong, "the daemon, which has no torch, cannot know"
        with refused("HP-WIRE-001", said):
            await holder.submit(c.PrepareBlock(block=0, graph=packed, update=UPDATE, keeps=KEPT))
    with refused("HP-RUN-001", "optimizer"):
        await holder.submit(c.PrepareBlock(block=0, graph=graph, update={}, keeps=KEPT))
    await holder.submit(c.PrepareBlock(block=0, graph=graph, update=UPDATE, keeps=KEPT))
    with refused("HP-WIRE-001", "state"):
        await holder.load_state(0, state_file(MODEL, second))
    await holder.load_state(0, state_file(MODEL, first))
    await holder.submit(c.Unload(block=0))
    assert (await holder.submit(c.Info())).blocks == ()
