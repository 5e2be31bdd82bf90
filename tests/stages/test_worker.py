"""The engine without a process: what each command does, and that a refused one changes nothing."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.data.draws import Draw
from hetpeer.stages.execution import commands as c
from hetpeer.stages.execution import results as r
from hetpeer.stages.execution.arena import Extent
from hetpeer.stages.execution.command import Lane
from hetpeer.stages.execution.frames import (
    MAX_FRAME_BYTES,
    PREFIX,
    FrameReader,
    decode_command,
    decode_result,
    encode_command,
    encode_result,
)
from hetpeer.stages.execution.results import CommandFailedError
from hetpeer.stages.execution.state import load
from hetpeer.stages.execution.transfers import ForgetResiduals
from hetpeer.stages.execution.worker import WorkerOptions, serve
from hetpeer.stages.graph.wire import pack_block
from hetpeer.stages.links import codecs
from hetpeer.stages.links.codec import Codec, Values, Written, value_bytes
from tests.stages.compute_rig import (
    KEPT,
    UPDATE,
    Holder,
    cpu_engine,
    layout,
    microbatch,
    state_file,
    submitter,
    tiny_blocks,
    tiny_gpt,
)

DRAW = Draw(0, 0, 0, 1)
MODEL = tiny_gpt()


@pytest.fixture
async def holder(engine, arena):
    """Holds the whole model."""
    made = Holder(submitter(engine), arena, tiny_blocks())
    await made.load(MODEL)
    return made


def refused(code, text):
    return pytest.raises(CommandFailedError, match=f"{code}: .*{text}")


def plain_gradient(number, weight):
    """Parameter name → gradient of one microbatch, by autograd alone."""
    parameters = dict(MODEL.named_parameters())
    loss = MODEL(**microbatch(number))
    found = torch.autograd.grad(loss, list(parameters.values()), grad_outputs=torch.tensor(weight))
    return dict(zip(parameters, found, strict=True))


def flat(gradient, spec):
    return torch.cat([gradient[name].ravel() for name in spec.parameter_specs]).numpy()


async def backward(holder, number, slot, **options):
    _, _, data = await holder.forward(f"mb{number}", number)
    await holder.backward(f"mb{number}", slot, **options)
    holder.release(data)


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
            c.ExportSlot(
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
        await holder.submit(c.Sum(parts=tuple(extents[i] for i in order), into=into, elements=2))
        expected = parts[order[0]]
        for i in order[1:]:
            expected = expected + parts[i]
        assert np.array_equal(holder.floats(into), expected)
    for overwritten in (extents[1], extents[0]):
        with refused("HP-WORK-001", "overwrite"):
            await holder.submit(c.Sum(parts=tuple(extents[:2]), into=overwritten, elements=2))


async def test_a_sum_names_the_parts_that_are_no_numbers(holder):
    parts = [np.array(part, np.float32) for part in ((1, 2), (np.nan, 1), (2, -np.inf), (3e38, 1), (3e38, 1))]
    extents = [holder.put(part) for part in parts]
    into = holder.arena.allocate(8)
    for chosen, unsound in (((0, 3), ()), ((0, 1, 2), (1, 2)), ((2, 0), (0,)), ((3, 4), ())):
        summed = await holder.submit(c.Sum(parts=tuple(extents[i] for i in chosen), into=into, elements=2))
        assert summed.unsound == unsound


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


async def test_a_token_beyond_the_vocabulary_is_an_answer(holder):
    tokens = holder.put(np.full((2, 8), 9999, np.int64))
    targets = holder.put(np.zeros((2, 8), np.int64))
    data = {"tokens": tokens, "targets": targets}
    with refused("HP-WIRE-001", "embedding"):
        await holder.submit(
            c.Forward(
                step=0, version=0, task="t", begin=0, end=len(holder.blocks), batch=2, draw=DRAW, data=data
            )
        )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"end": 99}, "is not loaded"),
        ({"end": 0}, "runs no block"),
        ({"version": 1}, "version 1 is not here, but 0"),
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
        "version": 0,
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
    state = holder.put(state_file(MODEL, holder.blocks[0]))
    await holder.submit(c.Load(block=0, state=state))
    with refused("HP-WORK-001", "no graph is kept of task c"):
        await holder.backward("c", 0)


async def test_state_goes_out_and_comes_back_with_its_digest(holder, engine, arena):
    spec = holder.blocks[1]
    gradient = holder.put(flat(plain_gradient(1, 1.0), spec))
    applied = await holder.apply(spec, gradient, 0.5)
    data = await holder.state(1)
    assert load(data, 1, layout(spec), KEPT).digest() == applied.digest
    other = Holder(submitter(cpu_engine(arena)), arena, [spec])
    await other.submit(c.Prepare(block=1, graph=pack_block(spec), update=UPDATE, keeps=KEPT))
    loaded = await other.submit(c.Load(block=1, state=other.put(data)))
    assert (loaded.version, loaded.digest) == (1, applied.digest)
    assert await holder.apply(spec, gradient, 1.0) == await other.apply(spec, gradient, 1.0)


async def test_apply_refuses_bad_numbers_and_ends_the_step(holder):
    spec = holder.blocks[0]
    before = await holder.state(0)
    bad = flat(plain_gradient(1, 1.0), spec)
    bad[-1] = np.nan
    with refused("HP-NUM-001", "block 0: 'gradient' is not finite"):
        await holder.apply(spec, holder.put(bad), 1.0)
    assert await holder.state(0) == before
    await backward(holder, 1, slot=0)
    await holder.apply(spec, await holder.export(spec, 0), 1.0)
    with refused("HP-WORK-001", "block 0 has no slot 0"):
        await holder.export(spec, 0)


async def test_an_average_replaces_the_parameters_and_leaves_the_moments(holder, arena):
    spec = holder.blocks[0]
    gradient = holder.put(flat(plain_gradient(1, 1.0), spec))
    await holder.apply(spec, gradient, 1.0)
    before = load(await holder.state(0), 0, layout(spec), KEPT)
    count = spec.parameter_count
    sent = arena.allocate(4 * count)
    await holder.submit(c.ExportState(block=0, begin=0, end=count, extent=sent))
    assert arena.view(sent).tobytes() == before.parameters.tobytes()
    total = before.parameters * np.float32(3.0) + np.float32(1.0)
    installed = await holder.submit(c.Install(block=0, total=holder.put(total), coefficient=1 / 3, plan=1))
    after = load(await holder.state(0), 0, layout(spec), KEPT)
    assert (after.version, after.averages, after.digest()) == (2, 1, installed.digest)
    assert after.parameters.tobytes() == (total * np.float32(1 / 3)).tobytes()
    assert after.optimizer.keys() == before.optimizer.keys() == set(KEPT)
    assert all((after.optimizer[name] == before.optimizer[name]).all() for name in KEPT)
    bad = total.copy()
    bad[0] = np.inf
    with refused("HP-NUM-001", "block 0: 'average' is not finite"):
        await holder.submit(c.Install(block=0, total=holder.put(bad), coefficient=1.0, plan=1))
    assert load(await holder.state(0), 0, layout(spec), KEPT).digest() == after.digest()


async def test_a_delayed_average_keeps_what_was_trained_since_its_copy(holder, arena):
    spec = holder.blocks[0]
    count = spec.parameter_count
    sent = arena.allocate(4 * count)

    async def exported(**copy):
        await holder.submit(c.ExportState(block=0, begin=0, end=count, extent=sent, **copy))
        return np.frombuffer(bytes(arena.view(sent)), np.float32)

    with refused("HP-WORK-001", "block 0 has no copy"):
        await exported(copy=True)
    first = await exported()
    await holder.submit(c.KeepCopy(block=0))
    await holder.apply(spec, holder.put(flat(plain_gradient(1, 1.0), spec)), 1.0)
    now = await exported()
    assert (await exported(copy=True)).tobytes() == first.tobytes() != now.tobytes()
    total = first * np.float32(2.0) + np.float32(1.0)
    await holder.submit(c.Install(block=0, total=holder.put(total), coefficient=0.5, plan=1))
    mean = total * np.float32(0.5)
    assert (await exported()).tobytes() == ((mean - first) + now).tobytes()
    await holder.submit(c.DropCopies())
    await holder.submit(c.KeepCopy(block=0))
    await holder.submit(c.Install(block=0, total=holder.put(total), coefficient=0.5, plan=1))
    assert (await exported()).tobytes() == mean.tobytes(), "nothing was trained since: it is the mean"


async def test_what_rounding_takes_from_parameters_stays_here(holder, arena):
    """s of p is sent, the sum is rounded as well, and p + (m - s) is installed; under another plan nothing is."""
    spec = holder.blocks[0]
    count = spec.vector_count
    sent, written = arena.allocate(4 * count), arena.allocate(4 * count)
    codec, one = Codec(Values.INT4), {"codec": "int4", "plan": 2, "block": 0, "begin": 0}
    before = load(await holder.state(0), 0, layout(spec), KEPT).parameters

    async def read(data):
        target = torch.empty(count)
        codecs.decode(codec, Written(count), arena.view(data)[: value_bytes(Values.INT4, count)], target)
        return target.numpy()

    how = c.Rounding(**one, keeps=c.PARAMETERS[0])
    export = c.ExportState(block=0, begin=0, end=count, extent=sent, rounding=how)
    assert (await holder.submit(export)).rounded
    ours = await read(sent)
    assert np.abs(ours - before).max() > 0
    parts, total = (holder.put(ours), holder.put(ours + np.float32(0.5))), arena.allocate(4 * count)
    how = c.Rounding(**one, keeps=c.PARAMETERS[1], parts=2)
    added = await holder.submit(c.Sum(parts=parts, into=total, elements=count, rounding=how, rounded=written))
    assert (added.rounded, added.unsound) == (True, ())
    summed = np.frombuffer(bytes(arena.view(total)), np.float32)
    assert (summed == await read(written)).all(), "what the reducer has is what others read"
    await holder.submit(c.Install(block=0, total=total, coefficient=0.5, plan=2))
    after = load(await holder.state(0), 0, layout(spec), KEPT).parameters
    assert after.tobytes() == (summed * np.float32(0.5) + (before - ours)).tobytes()
    await holder.submit(c.Install(block=0, total=total, coefficient=0.5, plan=3))
    plain = load(await holder.state(0), 0, layout(spec), KEPT).parameters
    assert plain.tobytes() == (summed * np.float32(0.5)).tobytes()


async def test_an_outer_optimizer_goes_on_from_what_was_averaged_last(arena):
    """Without momentum: half of the way from the first parameters to the mean. Its state travels with the block."""
    spec, outer = tiny_blocks()[0], {"learning_rate": 0.5, "momentum": 0.0}
    keeps = (*KEPT, "outer_anchor", "outer_momentum")
    holder = Holder(submitter(cpu_engine(arena)), arena, [spec])
    prepare = c.Prepare(block=0, graph=pack_block(spec), update=UPDATE, keeps=keeps, outer=outer)
    holder.dump_bytes[0] = (await holder.submit(prepare)).dump_bytes
    file = state_file(MODEL, spec)
    first = load(file, 0, layout(spec), keeps)
    loaded = await holder.submit(c.Load(block=0, state=holder.put(file)))
    assert loaded.digest == first.digest(), "what a run begins with is not in its files"
    await holder.apply(spec, holder.put(flat(plain_gradient(1, 1.0), spec)), 1.0)
    total = first.parameters + np.float32(2.0)
    await holder.submit(c.Install(block=0, total=holder.put(total), coefficient=1.0, plan=1))
    file = await holder.state(0)
    after = load(file, 0, layout(spec), keeps)
    assert np.allclose(after.parameters, first.parameters + 1.0, atol=1e-6)
    assert (after.optimizer["outer_anchor"] == after.parameters).all()
    again = await holder.submit(c.Load(block=0, state=holder.put(file)))
    assert again.digest == after.digest()


async def test_the_schedule_follows_the_batch_and_the_bias_correction_the_updates(arena):
    """Adam's second update, whatever was averaged in between and whatever batch it is of."""
    spec, falling = tiny_blocks()[0], UPDATE | {"schedule": ((1, 1.0), (10, 0.1))}
    gradient = flat(plain_gradient(1, 1.0), spec)

    async def two_updates(batch, *, averaging):
        holder = Holder(submitter(cpu_engine(arena)), arena, [spec])
        prepared = await holder.submit(c.Prepare(block=0, graph=pack_block(spec), update=falling, keeps=KEPT))
        holder.dump_bytes[0] = prepared.dump_bytes
        await holder.submit(c.Load(block=0, state=holder.put(state_file(MODEL, spec))))
        one = {
            "block": 0,
            "gradient": holder.put(gradient),
            "coefficient": 1.0,
            "plan": 1,
            "microbatches": 1,
            "needed": 9,
            "base": 0,
        }
        await holder.submit(c.Apply(**one, batch=0))
        if averaging:
            same = load(await holder.state(0), 0, layout(spec), KEPT).parameters
            await holder.submit(c.Install(block=0, total=holder.put(same), coefficient=1.0, plan=1))
        await holder.submit(c.Apply(**one, batch=batch))
        return load(await holder.state(0), 0, layout(spec), KEPT).parameters.tobytes()

    assert await two_updates(5, averaging=True) == await two_updates(5, averaging=False)
    assert await two_updates(5, averaging=False) != await two_updates(1, averaging=False)


async def test_a_step_is_computed_with_the_version_with_which_it_began(holder):
    """Weight stashing: updates come in between forward and backward, and before the forward; slots are those of each step."""
    spec, last = holder.blocks[1], len(holder.blocks)

    async def begin(step, version):
        data = {n: holder.put(x) for n, x in microbatch(3).items()}
        common = {"task": "t", "begin": 0, "end": last, "batch": 2, "draw": DRAW, "data": data}
        return (await holder.submit(c.Forward(step=step, version=version, **common))).loss

    async def gradient(step):
        await holder.submit(c.Backward(step=step, task="t", slot=0, fold=tuple(range(last))))
        holder.step = step
        return holder.floats(await holder.export(spec, 0)).copy()

    async def update(needed):
        for one in holder.blocks:
            await holder.apply(
                one, holder.put(np.full(one.vector_count, 0.5, np.float32)), 1.0, needed=needed
            )

    loss = await begin(0, 0)
    plain = await gradient(0)
    assert await begin(1, 0) == loss
    await update(needed=0)
    assert await begin(2, 0) == loss
    newest = await begin(3, 1)
    assert newest != loss
    for step in (1, 2):
        assert (await gradient(step) == plain).all(), step
    assert (await gradient(3) != plain).any()
    await holder.submit(c.ClearStep(step=1))
    for step, there in ((1, False), (2, True)):
        holder.step = step
        with contextlib.nullcontext() if there else refused("HP-WORK-001", f"no slot 0 of step {step}"):
            await holder.export(spec, 0)
    await update(needed=1)
    with refused("HP-WORK-001", "version 0 is not here, but 1, 2"):
        await begin(4, 0)
    assert await begin(4, 1) == newest
    await update(needed=3)
    with refused("HP-WORK-001", "version 2 is not here, but 3"):
        await begin(5, 2)


async def test_versions_kept_for_others_change_no_update(arena):
    """The same updates in place and beside older versions: the same bits."""
    spec = tiny_blocks()[0]
    digests = []
    for kept in (0, 1, 9):
        alone = Holder(submitter(cpu_engine(arena)), arena, [spec])
        await alone.load(MODEL)
        for step in range(4):
            gradient = alone.put(np.full(spec.vector_count, 0.1 * (step + 1), np.float32))
            done = await alone.apply(spec, gradient, 0.5, needed=max(0, step + 1 - kept))
        digests.append(done.digest)
    assert len(set(digests)) == 1


async def test_a_stale_gradient_is_compensated_for_what_was_applied_meanwhile(arena):
    """DC-ASGD, Eq. 10, on the clipped gradient; a fresh one is as it is."""
    spec, rate, strength = tiny_blocks()[0], 0.5, 3.0
    plain = {"name": "SGD", "learning_rate": rate, "momentum": 0.0, "weight_decay": 0.0}
    alone = Holder(submitter(cpu_engine(arena)), arena, [spec])
    prepared = await alone.submit(c.Prepare(block=0, graph=pack_block(spec), update=plain, keeps=()))
    alone.dump_bytes[0] = prepared.dump_bytes
    await alone.submit(c.Load(block=0, state=alone.put(state_file(MODEL, spec))))

    async def parameters():
        return load(await alone.state(0), 0, layout(spec), ()).parameters.copy()

    first, second = (
        np.random.default_rng(seed).normal(size=spec.vector_count).astype(np.float32) for seed in (1, 2)
    )
    versions = [await parameters()]
    await alone.apply(spec, alone.put(first), 0.5, needed=0, compensation=strength)
    versions.append(await parameters())
    assert np.allclose(versions[1], versions[0] - rate * 0.5 * first, atol=1e-6)
    await alone.apply(spec, alone.put(second), 0.25, needed=2, base=0, compensation=strength)
    clipped = 0.25 * second
    expected = clipped + strength * clipped**2 * (versions[1] - versions[0])
    assert np.allclose(await parameters(), versions[1] - rate * expected, atol=1e-6)
    with refused("HP-WORK-001", "version 0 is not here"):
        await alone.apply(spec, alone.put(second), 0.25, base=0, compensation=strength)
    assert len(await alone.state(0)) > 0, "what was refused changed nothing"


async def test_a_half_made_update_leaves_no_block(arena):
    class Breaks:
        def apply(self, **vectors):
            vectors["parameters"].add_(1)
            raise MemoryError("no scratch")

    holder = Holder(submitter(cpu_engine(arena, lambda _: Breaks())), arena, tiny_blocks()[:1])
    await holder.load(MODEL)
    gradient = holder.put(np.zeros(holder.blocks[0].parameter_count, np.float32))
    with refused("HP-MEM-002", "out of memory"):
        await holder.apply(holder.blocks[0], gradient, 1.0)
    with refused("HP-WORK-001", "block 0 is not loaded"):
        await holder.state(0)


async def test_what_is_loaded_is_checked(engine, arena):
    first, second = tiny_blocks()[:2]
    holder = Holder(submitter(engine), arena, [first])
    graph = pack_block(first)
    with refused("HP-WORK-001", "block 0 is not prepared"):
        await holder.submit(c.Load(block=0, state=holder.put(b"x")))
    with refused("HP-WORK-001", "says it is block 0"):
        await holder.submit(c.Prepare(block=1, graph=graph, update=UPDATE, keeps=KEPT))
    with refused("HP-WIRE-001", "block"):
        await holder.submit(c.Prepare(block=0, graph=graph[:-1], update=UPDATE, keeps=KEPT))
    with refused("HP-RUN-001", "optimizer"):
        await holder.submit(c.Prepare(block=0, graph=graph, update={}, keeps=KEPT))
    await holder.submit(c.Prepare(block=0, graph=graph, update=UPDATE, keeps=KEPT))
    with refused("HP-WIRE-001", "state"):
        await holder.submit(c.Load(block=0, state=holder.put(state_file(MODEL, second))))
    await holder.submit(c.Load(block=0, state=holder.put(state_file(MODEL, first))))
    await holder.submit(c.Unload(block=0))
    assert (await holder.submit(c.Info())).blocks == ()


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────

EXAMPLES = [
    c.Forward(
        step=3,
        version=2,
        task="3:1",
        begin=1,
        end=2,
        batch=2,
        draw=DRAW,
        inputs={"x": Extent(64, 128)},
        train=False,
    ),
    c.Prepare(block=2, graph=b"\x00\xff", update=UPDATE, keeps=KEPT),
    c.Sum(parts=(Extent(0, 8), Extent(64, 8)), into=Extent(128, 8), elements=2),
    c.Shutdown(),
]


@given(sizes=st.lists(st.integers(1, 200), max_size=50))
def test_frames_survive_any_split(sizes):
    stream = b"".join(encode_command(number, command) for number, command in enumerate(EXAMPLES))
    reader, found = FrameReader(), []
    for size in [*sizes, len(stream)]:
        found += [(number, decode_command(body)) for number, body in reader.feed(stream[:size])]
        stream = stream[size:]
    assert found == list(enumerate(EXAMPLES))


def test_results_come_back_as_they_were():
    for result in (
        r.Forwarded(loss=None, seconds=0.25),
        r.Inspected(digest="ab", squared_norm=float("inf"), finite=False),
        r.Failed(code="HP-X", what="so", why="thus", fix="try"),
    ):
        ((number, body),) = FrameReader().feed(encode_result(7, result))
        assert (number, decode_result(body)) == (7, result)


@settings(max_examples=300)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["kind", "block", "task", "unload"]), inner)
        ),
    ).map(msgpack.packb)
)
def test_decoders_raise_protocol_errors_only(body):
    for decode in (decode_command, decode_result):
        try:
            decode(body)
        except ProtocolError:
            continue


def test_an_oversized_frame_is_refused_by_its_length():
    with pytest.raises(ProtocolError, match="a frame of"):
        FrameReader().feed(PREFIX.pack(MAX_FRAME_BYTES + 1, 0))


@contextlib.contextmanager
def served(lanes):
    """A worker without a process: our end of its socket, and the future of `serve`."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with ours, theirs, ThreadPoolExecutor(1) as worker:
        serving = worker.submit(serve, theirs, lanes)
        yield ours, serving
        ours.shutdown(socket.SHUT_WR)
        wait([serving], 10)
        assert serving.done()


def answers(connection, count):
    """(number, result) of the next `count` answers."""
    reader, found = FrameReader(), []
    while len(found) < count:
        found += reader.feed(connection.recv(4096))
    return [(number, decode_result(body)) for number, body in found]


def test_serve_answers_until_the_daemon_closes(engine):
    with served({Lane.COMPUTE: engine.execute}) as (connection, serving):
        connection.sendall(encode_command(1, c.Info()) + PREFIX.pack(3, 2) + b"bad")
        found = dict(answers(connection, 2))
        assert isinstance(found[1], r.WorkerInfo)
        assert isinstance(found[2], r.Failed)
    assert serving.exception() is None


def test_a_lane_does_not_wait_for_another_and_keeps_its_own_order():
    done, free = [], threading.Event()

    def compute(command):
        assert free.wait(10)
        done.append(command.block)
        return r.Done()

    lanes = {Lane.COMPUTE: compute, Lane.SEND: lambda _: r.Done()}
    with served(lanes) as (connection, _):
        for number in range(3):
            connection.sendall(encode_command(number, c.Unload(block=number)))
        connection.sendall(encode_command(3, ForgetResiduals()))
        assert [number for number, _ in answers(connection, 1)] == [3]
        free.set()
        assert [number for number, _ in answers(connection, 3)] == done == [0, 1, 2]
        connection.sendall(encode_command(4, c.Unload(block=4)) + encode_command(5, c.Shutdown()))
        assert answers(connection, 2) == [(4, r.Done()), (5, r.Done())]


def test_what_a_lane_cannot_answer_ends_the_worker():
    def broken(_):
        raise torch.AcceleratorError("the context is lost")

    with served({Lane.COMPUTE: broken}) as (connection, serving):
        connection.sendall(encode_command(1, c.Info()))
        assert connection.recv(1) == b""
    assert isinstance(serving.exception(), torch.AcceleratorError)


def test_options_survive_the_command_line():
    options = WorkerOptions(socket=3, arena=4, parent=5, device="cuda:1", threads=2, nice=0)
    assert WorkerOptions.parse(options.arguments()) == options
