"""Where a block's vectors lie changes no number: one history at each kind of offload; what fails there."""

import functools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.base.file_pieces import FilePart, OpenFile
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.graph.parameter_reads import cast_parameters, weight_bytes
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.operators.names import PRODUCTS
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from hetpeer.stages.worker.holding import stored_vector
from hetpeer.stages.worker.holding.scratch_file import ScratchFile, write
from hetpeer.stages.worker.holding.stored_vector import InFile, InMemory
from tests.stages.compute_rig import (
    KEPT,
    MODEL,
    Holder,
    backward,
    cpu_engine,
    microbatch,
    refused,
    submitter,
    tiny_blocks,
    tiny_gpt,
)

KINDS = [
    (Offload.NONE, False),
    (Offload.DISK, False),
    (Offload.HOST, True),
    (Offload.DISK, True),
]
"""(kind, whether the device has memory of its own): here a second set of vectors stands for a GPU's."""
OUTER = {"learning_rate": 0.7, "momentum": 0.9}
OUTER_KEPT = (*KEPT, "outer_anchor", "outer_momentum")


@pytest.fixture
def file(tmp_path):
    return OpenFile.nameless(tmp_path)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """The tiny blocks have some thousand parameters: more than one piece."""
    monkeypatch.setattr(stored_vector, "PIECE", 1000)


async def holder_of(engine, arena, offload, outer=None, blocks=None, cast=False):
    """Holds the whole tiny model."""
    one = Holder(submitter(engine), arena, blocks or tiny_blocks())
    await one.load(MODEL, KEPT if outer is None else OUTER_KEPT, offload=offload, outer=outer, cast=cast)
    return one


async def history(one, compensation=2.0):
    """All that is seen of blocks through sums, updates beside older versions, and an average."""
    seen = []
    for step, needed in enumerate((1, 1, 3, 4)):
        one.step = step
        for slot, number in ((0, 1), (0, 2), (1, 3), (2, 4), (1, 5)):
            await backward(one, number, slot=slot)
        await one.merge(2, 1)
        await one.merge(1, 0)
        base = step - 1 if step == 2 else step
        for spec in one.blocks:
            gradient = await one.export(spec, 0)
            seen.append(bytes(one.arena.view(gradient)))
            one.step = step
            done = await one.apply(spec, gradient, 0.5, needed=needed, base=base, compensation=compensation)
            seen.append(done.digest)
            one.release(gradient)
    for spec in one.blocks:
        await one.submit(v.CopyBlock(block=spec.index))
        one.step = 4
        gradient = one.put(np.full(spec.vector_count, 0.25, np.float32))
        await one.apply(spec, gradient, 1.0, needed=5)
        total = one.put(np.linspace(-1, 1, spec.vector_count, dtype=np.float32))
        done = await one.submit(v.Install(block=spec.index, total=total, coefficient=0.5, plan=1))
        one.release(gradient, total)
        seen += [done.digest, await one.state(spec.index)]
    return seen


async def test_a_slot_is_applied_where_it_lies_at_all_kinds(arena, file):
    """Where one slot may be in memory, the first of two is in the file; its room there is free afterwards."""
    found = []
    for offload, own_memory in KINDS:
        scratch = ScratchFile(file, 1 << 20)
        one = await holder_of(cpu_engine(arena, scratch=scratch, own_memory=own_memory), arena, offload)
        before = scratch.used
        for slot, number in ((0, 1), (1, 2)):
            await backward(one, number, slot=slot)
        assert (scratch.used > before) == (offload is Offload.DISK)
        seen = []
        for spec in one.blocks:
            common = {"block": spec.index, "slot": 0}
            look = v.InspectSlot(step=0, normed=((1, spec.vector_count),), **common)
            inspected = await one.submit(look)
            update = {"coefficient": 0.5, "plan": 1, "batch": 0, "microbatches": 8, "needed": 1, "base": 0}
            applied = await one.submit(v.Apply(**common, **update))
            seen.append((inspected.digest, inspected.squared_norm, applied.digest))
        found.append(seen)
        assert scratch.used == before
        for spec in one.blocks:
            await one.submit(c.Unload(block=spec.index))
    assert all(seen == found[0] for seen in found)


@pytest.mark.parametrize("outer", [None, OUTER], ids=["plain", "outer"])
async def test_all_kinds_hold_equal_bits(arena, file, outer):
    elements = sum(spec.vector_count for spec in tiny_blocks())
    found = []
    for offload, own_memory in KINDS:
        scratch = ScratchFile(file, 1 << 20)
        one = await holder_of(
            cpu_engine(arena, scratch=scratch, own_memory=own_memory), arena, offload, outer
        )
        found.append(await history(one))
        vectors = len(OUTER_KEPT if outer else KEPT) + own_memory + 1  # masters, and the copy to be averaged
        assert (scratch.used >= vectors * stored_vector.ITEM_BYTES * elements) == (offload is Offload.DISK)
        for spec in one.blocks:
            await one.submit(c.Unload(block=spec.index))
        assert scratch.used == 0
    for one in found[1:]:
        assert one == found[0]


@functools.cache
def bf16_blocks():
    """The blocks of a bf16 run."""
    return cut_blocks(trace(tiny_gpt(), microbatch(0), autocast=True), mode=ComputeMode(autocast=True))


async def test_weights_that_autocast_casts_anyway_are_kept_cast_and_no_bit_changes(arena, file):
    scratch, blocks = ScratchFile(file, 1 << 20), bf16_blocks()
    found = []
    for offload, own_memory in KINDS:
        engine = cpu_engine(arena, scratch=scratch, own_memory=own_memory)
        one = await holder_of(engine, arena, offload, blocks=blocks, cast=True)
        for spec in blocks:
            parameters = engine._held(spec.index).weights(0).parameters
            halved = {name for name, leaf in parameters.items() if leaf.dtype == torch.bfloat16}
            assert halved == (cast_parameters(spec) if own_memory else set())
            nbytes = sum(leaf.nbytes for leaf in parameters.values())
            assert nbytes == (weight_bytes(spec) if own_memory else spec.parameter_bytes)
        found.append(await history(one, compensation=0.0))
        for spec in blocks:
            await one.submit(c.Unload(block=spec.index))
    for one in found[1:]:
        assert one == found[0]


def test_what_products_alone_read_once_is_cast():
    layer, plain = bf16_blocks()[1], tiny_blocks()[1]
    assert {name for name in layer.parameter_specs if "ln_" not in name} == cast_parameters(layer)
    assert cast_parameters(bf16_blocks()[0]) == frozenset(), "an embedding's table is looked up in float32"
    assert cast_parameters(plain) == frozenset(), "a float32 run casts nothing"
    assert weight_bytes(plain) == plain.parameter_bytes
    assert weight_bytes(layer) < 0.52 * layer.parameter_bytes
    first = next(node for node in layer.nodes if node.op in PRODUCTS)
    twice = replace(layer, nodes=(*layer.nodes, replace(first, name="again")))
    assert len(cast_parameters(twice)) == len(cast_parameters(layer)) - 2, "its weight and its bias"


async def test_a_stale_gradient_cannot_be_corrected_without_the_float32_numbers(arena):
    one = await holder_of(
        cpu_engine(arena, own_memory=True), arena, Offload.HOST, blocks=bf16_blocks(), cast=True
    )
    spec = one.blocks[1]
    ones = one.put(np.ones(spec.vector_count, np.float32))
    await one.apply(spec, ones, 1.0, needed=0, compensation=2.0)
    before = await one.state(1)
    with refused("HP-WORK-001", "block 1 has no float32 numbers of that version"):
        await one.apply(spec, ones, 1.0, needed=0, base=0, compensation=2.0)
    assert await one.state(1) == before


@pytest.mark.parametrize(("offload", "most"), [(Offload.NONE, 2), (Offload.HOST, 2), (Offload.DISK, 1)])
async def test_few_sums_are_in_memory(arena, file, offload, most):
    engine = cpu_engine(arena, scratch=ScratchFile(file, 1 << 20), own_memory=True)
    one = await holder_of(engine, arena, offload)
    for slot in (0, 1, 2, 0, 3):
        await backward(one, 1, slot=slot)
        for spec in one.blocks:
            held = engine._held(spec.index)._slots._vectors.values()
            assert sum(isinstance(vector, InMemory) for vector in held) <= most
    found = [bytes(arena.view(await one.export(one.blocks[0], slot))) for slot in (1, 2, 3)]
    assert found[0] == found[1] == found[2], "equal microbatches have equal sums, wherever they lie"


@pytest.mark.parametrize(
    ("offload", "own_memory", "working", "reduced"),
    [
        (Offload.NONE, False, 2, 1),
        (Offload.DISK, False, 1, 0),
        (Offload.HOST, True, 2, 1),
        (Offload.DISK, True, 1, 0),
        (Offload.NONE, True, 2, 2),  # the slots are on the device, the sum is not
    ],
)
async def test_a_slot_makes_way_for_the_sum_of_a_reduce(arena, file, offload, own_memory, working, reduced):
    """From the first part that leaves to the end of the step; the parts are those of the slot in memory."""
    engine = cpu_engine(arena, scratch=ScratchFile(file, 1 << 20), own_memory=own_memory)
    one = await holder_of(engine, arena, offload)
    spec = one.blocks[0]
    slots = engine._held(spec.index)._slots

    def in_memory():
        return sum(isinstance(vector, InMemory) for vector in slots._vectors.values())

    for slot in (0, 1):
        await backward(one, slot, slot=slot)
    before = bytes(slots.at(0, 1).piece(0, spec.vector_count).cpu().numpy())
    assert in_memory() == working
    assert bytes(arena.view(await one.export(spec, 1))) == before
    assert in_memory() == reduced
    await backward(one, 2, slot=2)
    assert in_memory() == max(reduced, 1), "work that is done again has its slot in memory"
    await one.submit(c.ClearStep(step=0))
    for slot in (0, 1):
        await backward(one, slot, slot=slot)
    assert in_memory() == working


async def test_a_place_that_counts_on_no_disk_has_none(arena, file):
    """The owner's limit leaves nothing for it: it is for bundles and copies of states then."""
    scratch = ScratchFile(file, 1 << 30)
    one = Holder(submitter(cpu_engine(arena, scratch=scratch)), arena, tiny_blocks())
    await one.load(MODEL, KEPT, offload=Offload.NONE, spills=False)
    for slot in range(4):
        await backward(one, slot, slot=slot)
    assert scratch.used == 0


async def test_a_sum_stays_in_memory_if_the_file_has_no_room(arena, file, capfd):
    engine = cpu_engine(arena, scratch=ScratchFile(file, 0))
    one = await holder_of(engine, arena, Offload.NONE)
    for slot in range(4):
        await backward(one, slot, slot=slot)
    sums = {bytes(arena.view(await one.export(one.blocks[0], slot))) for slot in range(4)}
    assert len(sums) == 4
    said = capfd.readouterr().err.splitlines()
    assert len(said) == len(one.blocks), "each block says it once"
    assert all("HP-DISK-007: the scratch file has no room" in line for line in said)


async def test_a_place_has_its_part_of_the_file_and_the_next_one_another(arena, file, capfd):
    scratch = ScratchFile(file, 1 << 30)
    one = Holder(submitter(cpu_engine(arena, scratch=scratch)), arena, tiny_blocks())
    for limit, spilled in ((0, False), (1 << 20, True)):
        await one.submit(c.LimitScratch(nbytes=limit))
        await one.load(MODEL, KEPT, offload=Offload.NONE)
        for slot in range(3):
            await backward(one, slot, slot=slot)
        assert 0 <= scratch.used <= limit
        assert (scratch.used > 0) == spilled == ("HP-DISK-007" not in capfd.readouterr().err)
        for spec in one.blocks:
            await one.submit(c.Unload(block=spec.index))
    scratch.take(1)
    with pytest.raises(ValueError, match="are taken"):
        scratch.keep_within(1 << 30)


async def test_a_block_that_does_not_fit_into_the_file_is_not_loaded_and_takes_nothing(arena, file):
    spec = tiny_blocks()[1]
    scratch = ScratchFile(file, 4 * spec.vector_count + 4096)  # for one of the two moments
    one = Holder(submitter(cpu_engine(arena, scratch=scratch)), arena, [spec])
    with refused("HP-DISK-007", "the limit of 0.0 GiB is reached"):
        await one.load(MODEL, offload=Offload.DISK)
    assert scratch.used == 0
    with refused("HP-WORK-001", "block 1 is not loaded"):
        await one.state(1)


def test_a_full_disk_is_refused_before_anything_is_written():
    """/dev/full has no room whatever the limit says; a device cannot be reserved either."""
    full = OpenFile(os.open("/dev/full", os.O_RDWR))
    scratch = ScratchFile(full, 1 << 20)
    with pytest.raises(LocalError, match="HP-DISK-007"):
        scratch.take(1000)
    assert scratch.used == 0
    with pytest.raises(LocalError, match=r"HP-DISK-008: .*cannot be written; why: No space left"):
        write(FilePart(full, 0, 1), 0, memoryview(b"x"))


async def test_a_disk_that_fails_in_an_update_leaves_no_block(arena, file):
    """The file is cut short under an update: a part of the block would be of no version."""
    scratch = ScratchFile(file, 1 << 20)
    one = await holder_of(cpu_engine(arena, scratch=scratch), arena, Offload.DISK)
    spec = one.blocks[0]
    await one.apply(spec, one.put(np.ones(spec.vector_count, np.float32)), 1.0)
    os.ftruncate(file.descriptor, 5000)
    with refused("HP-DISK-008", "the scratch file cannot be read"):
        await one.apply(spec, one.put(np.ones(spec.vector_count, np.float32)), 1.0, needed=2, base=1)
    with refused("HP-WORK-001", "block 0 is not loaded"):
        await one.state(0)


def test_a_vector_in_the_file_is_read_and_changed_in_pieces(file):
    scratch = ScratchFile(file, 1 << 20)
    first, second = InFile(scratch, 2500), InFile(scratch, 10)
    first.fill(InMemory(torch.arange(2500.0)))
    second.fill(InMemory(torch.full((10,), -0.0)))
    for begin, end in stored_vector.pieces(0, 2500):
        piece = first.piece(begin, end)
        first.keep(begin, piece.mul_(2.0))
    assert torch.equal(first.whole(), torch.arange(2500.0) * 2)
    assert np.signbit(second.whole().numpy()).all()
    first.free()
    third = InFile(scratch, 2500)  # takes the same place again
    third.fill(InMemory(torch.ones(2500)))
    assert torch.equal(third.whole(), torch.ones(2500))
    assert np.signbit(second.whole().numpy()).all()
