"""The worker writes bundles and reads them again; a gradient comes back only to what was sent."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from hetpeer.bootstrap.audit.coded_borders import arrives
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.fingerprint import KEY_BYTES, distance
from hetpeer.stages.graph.block_spec import TensorSpec
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.arena import BundleLayout, Extent
from hetpeer.stages.ipc.block_commands import Decode, Encode, MarkBundle
from hetpeer.stages.links.codec import Codec, EncodedTensor
from hetpeer.stages.worker.bundle_codec import Decoder, Encoder
from hetpeer.stages.worker.tensor_staging import Copier, Staging
from tests.stages.compute_rig import Holder, submitter, tiny_blocks, tiny_gpt

COUNT = 6000
SPECS = {
    "hidden": TensorSpec(shape=(COUNT,), dtype="float32", grad=True),
    "mask": TensorSpec(shape=(30,), dtype="bool", grad=False),
    "half": TensorSpec(shape=(50, 2), dtype="bfloat16", grad=True),
}
LAYOUT = BundleLayout.of(SPECS)


class Coders(NamedTuple):
    encoder: Encoder
    decoder: Decoder


@pytest.fixture
def coders(arena):
    torch.set_num_threads(1)
    staging = Staging(arena.memory, Copier.of(torch.device("cpu")))
    return Coders(Encoder(staging), Decoder(staging))


def view(arena, extent, dtype=torch.float32):
    return torch.frombuffer(arena.view(extent), dtype=dtype)


def bundle(arena, seed=0):
    """A bundle in the arena: its extent, and its tensors."""
    extent = arena.allocate(LAYOUT.nbytes)
    generator = torch.Generator().manual_seed(seed)
    places = LAYOUT.within(extent)
    hidden = view(arena, places["hidden"])
    hidden.copy_(torch.randn(COUNT, generator=generator))
    view(arena, places["mask"], torch.bool).copy_(torch.rand(30, generator=generator) < 0.5)
    view(arena, places["half"], torch.bfloat16).copy_(torch.randn(100, generator=generator))
    return extent, hidden


def encode(coders, arena, extent, name, share=1.0, **more):
    codec = Codec.of(name)
    into = arena.allocate(LAYOUT.room(codec, share))
    done = coders.encoder.execute(
        Encode(codec=name, share=share, tensors=LAYOUT.tensors(extent), into=into, **more)
    )
    assert isinstance(done, r.Encoded), done
    assert done.nbytes == LAYOUT.written(codec, done.written)
    return Extent(offset=into.offset, nbytes=done.nbytes), done.written


def decode(coders, arena, name, written, data):
    extent = arena.allocate(LAYOUT.nbytes)
    arena.view(extent)[:] = bytes([7]) * LAYOUT.nbytes
    done = coders.decoder.execute(
        Decode(codec=name, written=written, data=data, tensors=LAYOUT.tensors(extent))
    )
    return done, extent


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "int4", "topk-bf16", "topk-int8", "topk-int4"])
def test_a_bundle_of_several_tensors_comes_back(coders, arena, name):
    extent, hidden = bundle(arena)
    data, written = encode(coders, arena, extent, name, share=0.2)
    done, back = decode(coders, arena, name, written, data)
    assert done == r.Done()
    places, found = LAYOUT.within(extent), LAYOUT.within(back)
    assert view(arena, places["mask"], torch.bool).equal(view(arena, found["mask"], torch.bool))
    there = view(arena, found["hidden"])
    kept = there != 0
    assert written[0].kept == (COUNT // 5 if name.startswith("topk") else COUNT)
    assert kept.sum() <= written[0].kept
    assert (there - hidden)[kept].abs().max() < (0.4 if name.endswith("int4") else 0.05)
    assert data.nbytes <= LAYOUT.nbytes


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk-bf16", "topk-int8", "topk-int4"])
def test_one_machine_gets_what_has_arrived(coders, arena, name):
    """A replay knows the codec and what was kept, and has no arena."""
    extent, _ = bundle(arena)
    data, written = encode(coders, arena, extent, name, share=0.03)
    _, back = decode(coders, arena, name, written, data)
    there, here = (
        {
            field: view(arena, place, getattr(torch, SPECS[field].dtype)).clone()
            for field, place in LAYOUT.within(at).items()
        }
        for at in (extent, back)
    )
    dtypes = {field: spec.dtype for field, spec in SPECS.items()}
    kept = [one.kept for one in written] if Codec.of(name).sparse else []
    found = arrives(there, dtypes, (name, kept))
    assert found.keys() == here.keys()
    assert all(found[field].equal(here[field]) for field in here)
    assert not found["hidden"].equal(there["hidden"])
    assert arrives(there, dtypes, (name, [1])) == there, "no honest log says that"


def test_zeros_are_not_kept(coders, arena):
    extent, hidden = bundle(arena)
    hidden[100:] = 0
    _, written = encode(coders, arena, extent, "topk-bf16", share=0.5)
    assert written[0].kept == 100


def test_feedback_adds_what_was_left_out(coders, arena):
    """Over many gradients nothing is lost but what is left out of the last."""
    sent, given = torch.zeros(COUNT), torch.zeros(COUNT)
    for seed in range(30):
        extent, gradient = bundle(arena, seed)
        gradient.add_(0.02)
        data, written = encode(coders, arena, extent, "topk-bf16", share=0.1, feedback="border 3")
        _, back = decode(coders, arena, "topk-bf16", written, data)
        sent += view(arena, LAYOUT.within(back)["hidden"])
        given += gradient
        for used in (extent, back):
            arena.release(used)
    assert (given - sent).abs().max() < 10
    assert abs(float((given - sent).mean())) < 0.2
    plain, _ = bundle(arena, 99)
    _, written = encode(coders, arena, plain, "topk-bf16", share=0.1)
    assert written[0].kept == COUNT // 10


def test_room_that_is_too_small_is_refused_and_the_worker_lives_on(coders, arena):
    extent, _ = bundle(arena)
    into = arena.allocate(100)
    done = coders.encoder.execute(Encode(codec="int8", tensors=LAYOUT.tensors(extent), into=into))
    assert isinstance(done, r.CommandFailed)
    assert encode(coders, arena, extent, "int8")


def test_damage_is_a_failure(coders, arena):
    extent, _ = bundle(arena)
    data, written = encode(coders, arena, extent, "topk-int8", share=0.1)
    arena.view(data)[1:2] = b"\x7f"  # the first scale becomes infinite
    arena.view(data)[0:1] = b"\x80"
    done, _ = decode(coders, arena, "topk-int8", written, data)
    assert isinstance(done, r.CommandFailed)
    assert done.code == "HP-WIRE-001"
    for wrong in (written[:2], (EncodedTensor(0), *written[1:]), (EncodedTensor(COUNT + 1), *written[1:])):
        with pytest.raises(ProtocolError):
            LAYOUT.written(Codec.of("topk-int8"), wrong)
        assert isinstance(decode(coders, arena, "topk-int8", wrong, data)[0], r.CommandFailed)


async def test_no_gradient_goes_back_to_what_was_left_out(engine, arena):
    submit = submitter(engine)
    blocks = tiny_blocks()
    holder = Holder(submit, arena, blocks[1:])
    await holder.load(tiny_gpt())
    (name, spec) = next(iter(blocks[1].inputs.items()))
    gradients = {}
    for sparse in (False, True):
        inputs = holder.room(blocks[1].inputs)
        values = torch.randn(spec.at(blocks[1].batch).count, generator=torch.Generator().manual_seed(1))
        values[::3] = 0
        view(arena, inputs[name]).copy_(values)
        data = {
            key: holder.put(np.zeros(one.at(blocks[1].batch).sizes, np.int64))
            for b in blocks[1:]
            for key, one in b.data.items()
        }
        task = f"task {sparse}"
        await submit(
            c.Forward(
                step=0,
                versions=(0,) * (len(blocks) - 1),
                task=task,
                begin=1,
                end=len(blocks),
                inputs=inputs,
                data=data,
                batch=blocks[1].batch,
                draw=_draw(),
                sparse=sparse,
            )
        )
        back = holder.room({name: spec})
        await submit(c.Backward(step=0, task=task, input_gradients=back, slot=0, fold=()))
        gradients[sparse] = view(arena, back[name]).clone()
    assert (gradients[True][::3] == 0).all()
    assert (gradients[False][::3] != 0).all()
    rest = torch.ones(len(values), dtype=torch.bool)
    rest[::3] = False
    assert gradients[True][rest].equal(gradients[False][rest])


def _draw():
    from hetpeer.stages.operators.random_draws import Draw

    return Draw(0, 0, 0, 1)


def marked(coders, extent, key=1):
    done = coders.decoder.execute(
        MarkBundle(tensors=LAYOUT.tensors(extent), key=key.to_bytes(KEY_BYTES, "little"))
    )
    assert isinstance(done, r.BundleMarked), done
    return done


def test_a_bundle_is_fingerprinted_by_what_is_rounded_and_what_is_not(coders, arena):
    extent, hidden = bundle(arena)
    places = LAYOUT.within(extent)
    first = marked(coders, extent)
    assert marked(coders, extent) == first
    assert distance(first.marks, marked(coders, extent, key=2).marks) > 0.5, "of another key"
    hidden.mul_(1 + 1e-5)
    rounded = marked(coders, extent)
    assert 0 < distance(first.marks, rounded.marks) < 1e-4
    assert rounded.digest != first.digest
    assert rounded.exact == first.exact
    view(arena, places["half"], torch.bfloat16).neg_()
    assert distance(first.marks, marked(coders, extent).marks) > 0.1
    view(arena, places["mask"], torch.bool).logical_not_()
    assert marked(coders, extent).exact != first.exact
