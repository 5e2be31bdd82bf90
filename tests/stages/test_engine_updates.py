"""The engine without a process: states, their updates and averages, and the versions that are kept."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from hetpeer.stages.block.state_file import load
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc.worker_messages import CommandFailedError
from hetpeer.stages.links import tensor_codecs
from hetpeer.stages.links.codec import Codec, EncodedTensor
from hetpeer.stages.links.sparse_movement import KEPT as KEPT_OF_WINDOW
from hetpeer.stages.links.sparse_movement import WINDOW
from hetpeer.stages.links.value_codecs import VALUE_CODECS
from hetpeer.stages.worker.holding.movement import CODEC as MOVEMENTS
from hetpeer.stages.worker.movement_sums import summed_movements
from tests.stages.compute_rig import (
    DRAW,
    KEPT,
    MODEL,
    UPDATE,
    Holder,
    backward,
    cpu_engine,
    flat,
    layout,
    microbatch,
    plain_gradient,
    refused,
    state_file,
    submitter,
    tiny_blocks,
)


async def test_state_goes_out_and_comes_back_with_its_digest(holder, engine, arena):
    spec = holder.blocks[1]
    gradient = holder.put(flat(plain_gradient(1, 1.0), spec))
    applied = await holder.apply(spec, gradient, 0.5)
    data = await holder.state(1)
    assert load(data, 1, layout(spec), KEPT).digest() == applied.digest
    other = Holder(submitter(cpu_engine(arena)), arena, [spec])
    await other.submit(c.PrepareBlock(block=1, graph=pack_block(spec), update=UPDATE, keeps=KEPT))
    loaded = await other.load_state(1, data)
    assert (loaded.version, loaded.digest) == (1, applied.digest)
    both = [await one.apply(spec, gradient, 1.0) for one in (holder, other)]
    assert both[0].digest == both[1].digest
    assert [one.version for one in both] == [2, 2]
    assert all(one.seconds > 0 for one in both)


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


async def test_a_slot_is_inspected_and_applied_where_it_lies_with_the_same_bits(holder, arena):
    """As its copy in the arena would be, and nothing of it is ever in the arena."""
    copied = Holder(submitter(cpu_engine(arena)), arena, holder.blocks)
    await copied.load(MODEL)
    for one in (holder, copied):
        for number in (1, 2):
            await backward(one, number, slot=0)
    for spec in holder.blocks:
        size = spec.parameter_count
        ranges = {"normed": ((0, size),), "groups": (((0, size // 2),), ((size // 2, size),))}
        copy = await copied.export(spec, 0)
        expected = await copied.submit(v.InspectVector(extent=copy, elements=size, **ranges))
        used = arena.used
        seen = await holder.submit(v.InspectSlot(step=0, block=spec.index, slot=0, **ranges))
        assert dataclasses.replace(seen, seconds=expected.seconds) == expected
        applied = await holder.submit(slot_update(spec))
        assert (await copied.apply(spec, copy, 0.5)).digest == applied.digest
        assert arena.used == used


async def test_only_a_slot_that_is_as_inspected_is_applied(holder):
    spec, last = holder.blocks[0], holder.blocks[-1]
    before = await holder.state(0)
    look = v.InspectSlot(step=0, block=0, slot=0, normed=())
    for changed in (
        lambda: backward(holder, 2, slot=0),
        lambda: holder.merge(1, 0),
        lambda: holder.submit(c.DropSlot(step=0, block=0, slot=0)),
    ):
        await backward(holder, 1, slot=0)
        await backward(holder, 3, slot=1)
        await holder.submit(look)
        await changed()
        with refused("HP-WORK-001", "slot 0 of step 0 at block 0 is not as inspected"):
            await holder.submit(slot_update(spec))
    assert await holder.state(0) == before
    await backward(holder, 1, slot=0)
    await holder.submit(look)
    await backward(holder, 2, slot=7)
    await holder.merge(7, 6)
    assert (await holder.submit(slot_update(spec))).version == 1, "other slots may change"
    with refused("HP-WORK-001", f"slot 0 of step 0 at block {last.index} is not as inspected"):
        await holder.submit(slot_update(last))


async def test_a_slot_that_is_not_finite_is_not_applied(holder, engine):
    await backward(holder, 1, slot=0)
    engine._blocks[0].slot(0, 0).whole()[0] = np.inf
    seen = await holder.submit(v.InspectSlot(step=0, block=0, slot=0, normed=()))
    assert not seen.finite
    with refused("HP-WORK-001", "slot 0 of step 0 at block 0 is not as inspected"):
        await holder.submit(slot_update(holder.blocks[0]))


def slot_update(spec):
    """Apply slot 0 of step 0."""
    common = {"plan": 1, "batch": 0, "microbatches": 8, "needed": 1, "base": 0}
    return v.Apply(block=spec.index, slot=0, coefficient=0.5, **common)


async def test_an_average_replaces_the_parameters_and_leaves_the_moments(holder, arena):
    spec = holder.blocks[0]
    gradient = holder.put(flat(plain_gradient(1, 1.0), spec))
    await holder.apply(spec, gradient, 1.0)
    before = load(await holder.state(0), 0, layout(spec), KEPT)
    count = spec.parameter_count
    sent = arena.allocate(4 * count)
    await holder.submit(v.ExportState(block=0, begin=0, end=count, extent=sent))
    assert arena.view(sent).tobytes() == before.parameters.tobytes()
    total = before.parameters * np.float32(3.0) + np.float32(1.0)
    installed = await holder.submit(v.Install(block=0, total=holder.put(total), coefficient=1 / 3, plan=1))
    after = load(await holder.state(0), 0, layout(spec), KEPT)
    assert (after.version, after.averages, after.digest()) == (2, 1, installed.digest)
    assert after.parameters.tobytes() == (total * np.float32(1 / 3)).tobytes()
    assert after.optimizer.keys() == before.optimizer.keys() == set(KEPT)
    assert all((after.optimizer[name] == before.optimizer[name]).all() for name in KEPT)
    bad = total.copy()
    bad[0] = np.inf
    with refused("HP-NUM-001", "block 0: 'average' is not finite"):
        await holder.submit(v.Install(block=0, total=holder.put(bad), coefficient=1.0, plan=1))
    assert load(await holder.state(0), 0, layout(spec), KEPT).digest() == after.digest()


async def test_a_delayed_average_keeps_what_was_trained_since_its_copy(holder, arena):
    spec = holder.blocks[0]
    count = spec.parameter_count
    sent = arena.allocate(4 * count)

    async def exported(**copy):
        await holder.submit(v.ExportState(block=0, begin=0, end=count, extent=sent, **copy))
        return np.frombuffer(bytes(arena.view(sent)), np.float32)

    with refused("HP-WORK-001", "block 0 has no copy"):
        await exported(copy=True)
    first = await exported()
    await holder.submit(v.CopyBlock(block=0))
    await holder.apply(spec, holder.put(flat(plain_gradient(1, 1.0), spec)), 1.0)
    now = await exported()
    assert (await exported(copy=True)).tobytes() == first.tobytes() != now.tobytes()
    total = first * np.float32(2.0) + np.float32(1.0)
    await holder.submit(v.Install(block=0, total=holder.put(total), coefficient=0.5, plan=1))
    mean = total * np.float32(0.5)
    assert (await exported()).tobytes() == ((mean - first) + now).tobytes()
    await holder.submit(v.DropCopies())
    await holder.submit(v.CopyBlock(block=0))
    await holder.submit(v.Install(block=0, total=holder.put(total), coefficient=0.5, plan=1))
    assert (await exported()).tobytes() == mean.tobytes(), "nothing was trained since: it is the mean"


async def test_a_mean_leaves_the_work_under_way_as_it_is(holder, arena):
    """Kept graphs, slots, and the parameters with which a step began: its sum has the same bits."""
    undisturbed = Holder(submitter(cpu_engine(arena)), arena, holder.blocks)
    await undisturbed.load(MODEL)
    sums = []
    for one in (holder, undisturbed):
        one.step = 1
        data = {n: one.put(x) for n, x in microbatch(3).items()}
        common = {"begin": 0, "end": len(one.blocks), "batch": 2, "draw": DRAW, "data": data}

        async def forward(task, one=one, common=common):
            await one.submit(c.Forward(step=1, versions=(0,) * len(one.blocks), task=task, **common))

        await forward("before")
        await one.backward("before", 0)
        await forward("across")
        if one is holder:
            for spec in one.blocks:
                total = one.put(np.full(spec.vector_count, 0.5, np.float32))
                how = v.Install(block=spec.index, total=total, coefficient=1.0, plan=1, needed=0)
                assert (await one.submit(how)).version == 1
        await one.backward("across", 0)
        await forward("after")
        await one.backward("after", 0)
        sums.append([one.floats(await one.export(spec, 0)).tobytes() for spec in one.blocks])
    assert sums[0] == sums[1]


async def test_what_rounding_takes_from_parameters_stays_here(holder, arena):
    """s of p is sent, the sum is rounded as well, and p + (m - s) is installed; under another plan nothing
    is.
    """
    spec = holder.blocks[0]
    count = spec.vector_count
    sent, written = arena.allocate(4 * count), arena.allocate(4 * count)
    codec, one = Codec(VALUE_CODECS["int4"]), {"codec": "int4", "plan": 2, "block": 0, "begin": 0}
    before = load(await holder.state(0), 0, layout(spec), KEPT).parameters

    async def read(data):
        target = torch.empty(count)
        tensor_codecs.decode(
            codec, EncodedTensor(count), arena.view(data)[: VALUE_CODECS["int4"].nbytes(count)], target
        )
        return target.numpy()

    how = v.Rounding(**one, keeps=v.PARAMETERS[0])
    export = v.ExportState(block=0, begin=0, end=count, extent=sent, rounding=how)
    assert (await holder.submit(export)).rounded
    ours = await read(sent)
    assert np.abs(ours - before).max() > 0
    parts, total = (holder.put(ours), holder.put(ours + np.float32(0.5))), arena.allocate(4 * count)
    how = v.Rounding(**one, keeps=v.PARAMETERS[1], parts=2)
    added = await holder.submit(
        v.SumVectors(parts=parts, into=total, elements=count, rounding=how, rounded=written)
    )
    assert (added.rounded, added.unsound) == (True, ())
    summed = np.frombuffer(bytes(arena.view(total)), np.float32)
    assert (summed == await read(written)).all(), "what the reducer has is what others read"
    await holder.submit(v.Install(block=0, total=total, coefficient=0.5, plan=2))
    after = load(await holder.state(0), 0, layout(spec), KEPT).parameters
    assert after.tobytes() == (summed * np.float32(0.5) + (before - ours)).tobytes()
    await holder.submit(v.Install(block=0, total=total, coefficient=0.5, plan=3))
    plain = load(await holder.state(0), 0, layout(spec), KEPT).parameters
    assert plain.tobytes() == (summed * np.float32(0.5)).tobytes()


async def test_an_outer_optimizer_goes_on_from_what_was_averaged_last(arena):
    """Without momentum: half of the way from the first parameters to the mean.

    Its state travels with the block.
    """
    spec, outer = tiny_blocks()[0], {"learning_rate": 0.5, "momentum": 0.0}
    keeps = (*KEPT, "outer_anchor", "outer_momentum")
    holder = Holder(submitter(cpu_engine(arena)), arena, [spec])
    prepare = c.PrepareBlock(block=0, graph=pack_block(spec), update=UPDATE, keeps=keeps, outer=outer)
    holder.dump_bytes[0] = (await holder.submit(prepare)).dump_bytes
    file = state_file(MODEL, spec)
    first = load(file, 0, layout(spec), keeps)
    loaded = await holder.load_state(0, file)
    assert loaded.digest == first.digest(), "what a run begins with is not in its files"
    await holder.apply(spec, holder.put(flat(plain_gradient(1, 1.0), spec)), 1.0)
    total = first.parameters + np.float32(2.0)
    await holder.submit(v.Install(block=0, total=holder.put(total), coefficient=1.0, plan=1))
    file = await holder.state(0)
    after = load(file, 0, layout(spec), keeps)
    assert np.allclose(after.parameters, first.parameters + 1.0, atol=1e-6)
    assert (after.optimizer["outer_anchor"] == after.parameters).all()
    again = await holder.load_state(0, file)
    assert again.digest == after.digest()


async def test_sparse_clusters_send_movements_and_get_the_same_parameters(arena):
    """Two clusters, and a second holder of a block of the first, which has sent nothing: what it must not
    send again is a matter of its own state.
    """
    spec, outer = tiny_blocks()[0], {"learning_rate": 0.5, "momentum": 0.5, "sparse": True}
    keeps, count = (*KEPT, "outer_anchor", "outer_momentum"), spec.vector_count
    holders = [Holder(submitter(cpu_engine(arena)), arena, [spec]) for _ in range(3)]
    first = load(state_file(MODEL, spec), 0, layout(spec), keeps)
    prepare = c.PrepareBlock(block=0, graph=pack_block(spec), update=UPDATE, keeps=keeps, outer=outer)
    for holder, number in zip(holders, (1, 2, 1), strict=True):
        holder.dump_bytes[0] = (await holder.submit(prepare)).dump_bytes
        await holder.load_state(0, state_file(MODEL, spec))
        await holder.apply(spec, holder.put(flat(plain_gradient(number, 1.0), spec)), 1.0)
    for version in (2, 3):
        parts = []
        for holder in holders[:2]:
            ours, sent = holder.put(np.zeros(count, np.float32)), arena.allocate(MOVEMENTS.nbytes(count))
            here = {"block": 0, "begin": 0, "end": count}
            await holder.submit(v.ExportMovement(**here, extent=ours, decoded=True))
            await holder.submit(v.ExportMovement(**here, extent=sent))
            parts.append(holder.floats(ours).copy())
            assert MOVEMENTS.decode(arena.view(sent), count).numpy().tobytes() == parts[-1].tobytes()
        total = summed_movements([torch.from_numpy(part) for part in parts]).numpy()
        for holder in holders:
            install = v.Install(block=0, total=holder.put(total), coefficient=0.5, plan=1)
            assert (await holder.submit(install)).version == version
        states = [load(await holder.state(0), 0, layout(spec), keeps) for holder in holders]
        for name in keeps[-2:]:
            assert len({state.optimizer[name].tobytes() for state in states}) == 1
        assert states[0].digest() == states[2].digest() != states[1].digest(), "each keeps its own"
        assert all((state.parameters != state.optimizer["outer_anchor"]).any() for state in states)
        for holder in holders:  # what was not sent comes back with the state
            await holder.load_state(0, await holder.state(0))
    moved = states[0].optimizer["outer_anchor"] != first.parameters
    assert 0 < np.count_nonzero(moved) <= 2 * 2 * KEPT_OF_WINDOW * (-(-count // WINDOW))


async def test_a_movement_is_of_whole_windows_and_of_a_sparse_run(holder, arena):
    into = arena.allocate(4096)
    with pytest.raises(CommandFailedError, match="sends no movements"):
        await holder.submit(v.ExportMovement(block=0, begin=0, end=9, extent=into))


async def test_the_schedule_follows_the_batch_and_the_bias_correction_the_updates(arena):
    """Adam's second update, whatever was averaged in between and whatever batch it is of."""
    spec, falling = tiny_blocks()[0], UPDATE | {"schedule": ((1, 1.0), (10, 0.1))}
    gradient = flat(plain_gradient(1, 1.0), spec)

    async def two_updates(batch, *, averaging):
        holder = Holder(submitter(cpu_engine(arena)), arena, [spec])
        prepared = await holder.submit(
            c.PrepareBlock(block=0, graph=pack_block(spec), update=falling, keeps=KEPT)
        )
        holder.dump_bytes[0] = prepared.dump_bytes
        await holder.load_state(0, state_file(MODEL, spec))
        one = {
            "block": 0,
            "gradient": holder.put(gradient),
            "coefficient": 1.0,
            "plan": 1,
            "microbatches": 1,
            "needed": 9,
            "base": 0,
        }
        await holder.submit(v.Apply(**one, batch=0))
        if averaging:
            same = load(await holder.state(0), 0, layout(spec), KEPT).parameters
            await holder.submit(v.Install(block=0, total=holder.put(same), coefficient=1.0, plan=1))
        await holder.submit(v.Apply(**one, batch=batch))
        return load(await holder.state(0), 0, layout(spec), KEPT).parameters.tobytes()

    assert await two_updates(5, averaging=True) == await two_updates(5, averaging=False)
    assert await two_updates(5, averaging=False) != await two_updates(1, averaging=False)


async def test_a_step_is_computed_with_the_version_with_which_it_began(holder):
    """Weight stashing: updates come in between forward and backward, and before the forward; slots are
    those of each step.
    """
    spec, last = holder.blocks[1], len(holder.blocks)

    async def begin(step, version):
        data = {n: holder.put(x) for n, x in microbatch(3).items()}
        common = {"task": "t", "begin": 0, "end": last, "batch": 2, "draw": DRAW, "data": data}
        versions = (version,) * last
        return (await holder.submit(c.Forward(step=step, versions=versions, **common))).loss

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
    first = holder.room(holder.blocks[0].outputs)
    data = {n: holder.put(x) for n, x in microbatch(3).items()}

    def common(begin, end):
        own = {n: data[n] for spec in holder.blocks[begin:end] for n in spec.data}
        return {"step": 3, "begin": begin, "batch": 2, "draw": DRAW, "data": own, "train": False}

    stale, fresh = {"end": 1, "versions": (0,)}, {"end": last, "versions": (1,) * (last - 1)}
    await holder.submit(c.Forward(task="a", outputs=first, **stale, **common(0, 1)))
    parts = await holder.submit(c.Forward(task="b", inputs=first, **fresh, **common(1, last)))
    mixed = {"end": last, "versions": stale["versions"] + fresh["versions"]}
    whole = await holder.submit(c.Forward(task="c", **mixed, **common(0, last)))
    assert whole.loss == parts.loss, "each block has a version of its own"
    assert whole.loss not in (loss, newest)
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
    prepared = await alone.submit(c.PrepareBlock(block=0, graph=pack_block(spec), update=plain, keeps=()))
    alone.dump_bytes[0] = prepared.dump_bytes
    await alone.load_state(0, state_file(MODEL, spec))

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
