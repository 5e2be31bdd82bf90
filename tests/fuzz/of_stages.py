"""Decoders of stages/: graphs, states, shards, tensors written by a codec, and the frames between daemon
and worker.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors.numpy import save

from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.dht.base.file_pieces import InMemory, read
from hetpeer.stages.block import block_state, state_file
from hetpeer.stages.block.fingerprint import KEY_BYTES, NBYTES
from hetpeer.stages.block.tensor_file import read_constants
from hetpeer.stages.data.microbatches import DataPlan, MicrobatchReader
from hetpeer.stages.data.shards import ArraySpec, ShardFile
from hetpeer.stages.data.token_shards import sample_of
from hetpeer.stages.graph.block_spec import Batch, BlockSpec, OperatorCall, Ref, Symbol, TensorSpec
from hetpeer.stages.graph.block_wire import pack_block, read_block
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.block_commands import Decode, Encode, ForgetResiduals, MarkBundle
from hetpeer.stages.ipc.worker_messages import (
    PREFIX,
    FrameReader,
    decode_command,
    decode_result,
    encode_message,
)
from hetpeer.stages.links.codec import Codec, EncodedTensor, codec_names, length, room, sparse_codec_names
from hetpeer.stages.links.sparse_positions import decode_positions, encode_positions
from hetpeer.stages.links.tensor_codecs import decode, encode
from hetpeer.stages.operators.random_draws import Draw
from tests.fuzz.target import CORPUS, Target, same

# ── graphs ──────────────────────────────────────────────────────────────────────────────────────────────────

ROWS = TensorSpec(shape=(Batch(1), 8), dtype="float32", grad=True)
BLOCK = BlockSpec(
    index=1,
    inputs={"x": ROWS},
    outputs={"out": ROWS},
    data={"mask": TensorSpec(shape=(Batch(1), 8), dtype="bool")},
    nodes=(
        OperatorCall(name="h", op="aten.mm.default", args=(Ref("x"), Ref("w")), kwargs={}),
        OperatorCall(name="d", op="hetpeer.dropout", args=(Ref("h"), 0.5, 0), kwargs={}),
        OperatorCall(
            name="z", op="aten.zeros.default", args=((8,),), kwargs={"dtype": Symbol("dtype", "float32")}
        ),
        OperatorCall(name="out", op="aten.where.self", args=(Ref("mask"), Ref("d"), Ref("z")), kwargs={}),
    ),
    parameters={"w": "layer.weight"},
    parameter_specs={"layer.weight": TensorSpec(shape=(8, 8), dtype="float32", grad=True)},
    buffers={},
    buffer_specs={},
    batch=4,
    flops_forward=584,
    activation_bytes=1000,
    loss=None,
)


def graphs() -> Iterable[bytes]:
    """One that is written by hand, and one of a traced model with all that hetpeer has operators of its
    own for.
    """
    return [pack_block(BLOCK), (CORPUS / "stages" / "graph" / "traced").read_bytes()]


def is_block(found: BlockSpec) -> None:
    block_state.element_count(block_state.layout_of(found))
    assert found.parameter_bytes >= 0
    found.at(found.batch)


def runs(data: bytes) -> BlockSpec:
    return unpack_block(data)


# ── states and shards ───────────────────────────────────────────────────────────────────────────────────────

LAYOUT = [("w", (4, 3)), ("b", (3,)), ("empty", (0,))]
KEPT = ("exp_avg", "exp_avg_sq")


def vector(seed: int) -> block_state.Vector:
    return np.random.default_rng(seed).random(15, np.float32)


def states() -> Iterable[bytes]:
    yield state_file.dump(block_state.BlockState(version=0, parameters=vector(0)), 2, LAYOUT)
    optimizer = {"exp_avg": vector(1)}
    full = block_state.BlockState(version=40, parameters=vector(0), optimizer=optimizer, averages=3)
    yield state_file.dump(full, 2, LAYOUT)


def load(data: bytes) -> block_state.BlockState:
    return state_file.load(data, 2, LAYOUT, KEPT)


def is_state(found: block_state.BlockState) -> None:
    again = load(state_file.dump(found, 2, LAYOUT))
    assert again.digest() == found.digest()


CONSTANTS = {
    "mask": TensorSpec(shape=(2, 2), dtype="bool"),
    "table": TensorSpec(shape=(3,), dtype="int64"),
}


def constants(data: bytes) -> dict[str, bytes]:
    stored = read_constants(InMemory(data), CONSTANTS)
    return {name: bytes(read(tensor, 0, tensor.nbytes)) for name, tensor in stored.items()}


def are_constants(found: dict[str, bytes]) -> None:
    assert {name: len(data) for name, data in found.items()} == {n: s.nbytes for n, s in CONSTANTS.items()}


FOLDER, _FILE = Path("/proc/self/fd"), os.memfd_create("shard")
TEXT, ARRAYS = (
    sample_of(4),
    {"x": ArraySpec(dtype="float32", shape=(2,)), "y": ArraySpec(dtype="int64", shape=())},
)


def shard(data: bytes) -> list[MicrobatchReader]:
    """A shard of whatever content that an author has put into a manifest: of text, or of arrays."""
    os.ftruncate(_FILE, 0)
    os.pwrite(_FILE, data, 0)
    one = ShardFile(name=str(_FILE), blake3=blake3(data).hexdigest(), bytes=len(data), samples=3)
    read = []
    refused: list[LocalError] = []
    for kind, sample in (("text", TEXT), ("arrays", ARRAYS)):
        plan = DataPlan(
            kind=kind,  # type: ignore[arg-type]
            sample=sample,
            train=(one,),
            heldout=(one,),
            seed=1,
            batch_size=2,
            microbatch_size=2,
            eval_microbatches=1,
        )
        try:
            batches = MicrobatchReader(FOLDER, plan)
            batches.open(one)
            read.append(batches)
        except LocalError as error:
            refused.append(error)
    if not read:
        raise refused[0]
    return read


def has_samples(found: list[MicrobatchReader]) -> None:
    for batches in found:
        for number in (0, 1):
            arrays = batches.microbatch(0, number)
            said = {name: (spec.dtype, (2, *spec.shape)) for name, spec in batches.plan.sample.items()}
            assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == said


def shards() -> Iterable[bytes]:
    yield save({"tokens": np.arange(13, dtype=np.uint8)})
    yield save({"x": np.ones((3, 2), np.float32), "y": np.arange(3)})


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────

CODECS = [*codec_names(), *sparse_codec_names()]
HEAD = struct.Struct("<BHHBH")
"""Which codec, elements, elements kept, form of the positions, bytes of squeezed values."""
DTYPES = {"float32": torch.float32, "int64": torch.int64}


def encoded() -> Iterable[bytes]:
    for number, name in enumerate(CODECS):
        for count in (0, 3, 70, 600):
            flat = torch.linspace(-3, 3, count).pow(3)
            codec, kept_there = Codec.of(name), max(1, count // 10)
            target = memoryview(bytearray(room(codec, "float32", count, kept_there)))
            written, size = encode(codec, flat, kept_there, target) if count else (EncodedTensor(0), 0)
            head = HEAD.pack(number, count, written.kept, written.form, written.value_bytes)
            yield head + bytes(target[:size])


def tensor(data: bytes) -> tuple[Codec, torch.Tensor]:
    """As the worker does it, after the length was found right."""
    if len(data) < HEAD.size:
        raise ProtocolError("no head")
    number, count, kept_there, form, values = HEAD.unpack_from(data)
    codec, body = Codec.of(CODECS[number % len(CODECS)]), memoryview(data)[HEAD.size :]
    positions = 0
    if codec.values is not None and codec.selects(kept_there, count):
        positions = len(body) - (values or codec.values.nbytes(kept_there))
        if positions < 0:
            raise ProtocolError("too short")
    dtype = "int64" if number & 0x80 else "float32"
    written = EncodedTensor(kept_there, form, positions, values)
    if length(codec, dtype, count, written) != len(body):
        raise ProtocolError("another length")
    found = torch.full((count,), 7, dtype=DTYPES[dtype])
    decode(codec, written, memoryview(bytearray(body)), found)
    return codec, found


def is_tensor(found: tuple[Codec, torch.Tensor]) -> None:
    codec, flat = found
    if codec.values is not None and flat.is_floating_point():
        assert torch.isfinite(flat).all()


PLACES = struct.Struct("<BHH")
"""Form, elements kept, elements."""


def positions(data: bytes) -> tuple[Any, int]:
    if len(data) < PLACES.size:
        raise ProtocolError("no head")
    form, kept_there, count = PLACES.unpack_from(data)
    return decode_positions(form % 4, memoryview(data)[PLACES.size :], kept_there, count), count


def rise(found: tuple[Any, int]) -> None:
    places, count = found
    assert (np.diff(places, prepend=-1) > 0).all()
    assert not len(places) or places[-1] < count
    form, data = encode_positions(places, count, squeeze=True)
    assert (decode_positions(form, data, len(places), count) == places).all()


def placed() -> Iterable[bytes]:
    for places, count in (([0, 3, 4, 700, 2000], 2001), (range(0, 600, 3), 601), (range(0, 4000, 40), 4000)):
        for squeeze in (True, False):
            form, data = encode_positions(np.array(places), count, squeeze=squeeze)
            yield PLACES.pack(form, len(places), count) + data


# ── between daemon and worker ───────────────────────────────────────────────────────────────────────────────

EXTENT = Extent(offset=64, nbytes=128)
ROUNDING = v.Rounding(codec="int8", plan=1, block=0, begin=0, keeps=v.GRADIENTS[0])
MARKING = v.Marking(block=1, begin=0, end=9, key=bytes(KEY_BYTES))
COMMANDS = [
    c.PrepareBlock(
        block=0,
        graph=b"\x80",
        buffers={"mask": EXTENT},
        update={"name": "AdamW", "betas": (0.9, 0.95), "schedule": ((1.0, 1.0),), "eps": 1e-8},
        groups=(("*.bias", {"weight_decay": 0.0}),),
        keeps=("exp_avg",),
        outer={"momentum": 0.9, "sparse": True},
    ),
    c.LoadState(block=0, state=EXTENT),
    c.Unload(block=0),
    c.Forward(
        step=1,
        versions=(1, 1),
        task="t",
        begin=0,
        end=2,
        batch=4,
        draw=Draw(seed=1, step=1, microbatch=0, microbatches=4),
        inputs={"x": EXTENT},
    ),
    c.Backward(step=1, task="t", output_gradients={"x": EXTENT}, slot=1, fold=(0, 1)),
    c.DropTask(step=1, task="t"),
    c.MergeSlot(step=1, block=0, source=2, target=1),
    c.DropSlot(step=1, block=0, slot=1),
    v.ExportSlot(step=1, block=0, slot=1, begin=0, end=9, extent=EXTENT, rounding=ROUNDING),
    v.ExportState(block=0, begin=0, end=9, extent=EXTENT, copy=True),
    v.ExportMovement(block=0, begin=4096, end=9000, extent=EXTENT, decoded=True),
    v.CopyBlock(block=0),
    v.DropCopies(),
    c.ClearStep(step=1),
    v.SumVectors(parts=(EXTENT, EXTENT), into=EXTENT, elements=32, rounding=ROUNDING, rounded=EXTENT),
    v.SumVectors(parts=(EXTENT,), into=EXTENT, elements=32, begin=9, markings=(MARKING, MARKING)),
    v.SumVectors(parts=(EXTENT,), into=EXTENT, elements=32, closely=True),
    v.InspectVector(extent=EXTENT, elements=32, normed=((0, 16),)),
    v.InspectVector(extent=EXTENT, elements=32, normed=((0, 16),), groups=(((0, 4),), ((4, 16),))),
    v.InspectVector(extent=EXTENT, elements=32, normed=((0, 16),), pieces=(EXTENT,)),
    v.InspectSlot(step=1, block=0, slot=1, normed=((0, 16),), groups=(((0, 4),), ((4, 16),))),
    v.Apply(block=0, slot=1, coefficient=0.5, plan=1, batch=3, microbatches=8, needed=3, base=3),
    v.Apply(block=0, gradient=EXTENT, coefficient=0.5, plan=1, batch=3, microbatches=8, needed=3, base=3),
    v.Install(block=0, total=EXTENT, coefficient=0.5, plan=1),
    c.DumpState(block=0, extent=EXTENT),
    c.WarmUp(),
    v.MarkSlot(step=3, slot=1 << 40, marking=MARKING),
    v.MarkVector(pieces=(EXTENT, EXTENT), begin=4, marking=MARKING),
    c.Rehearse(block=0),
    c.LimitScratch(nbytes=1 << 20),
    c.Info(),
    c.Shutdown(),
    Encode(codec="topk-int8", share=0.1, tensors=(("float32", EXTENT),), into=EXTENT),
    Decode(codec="int8", written=(EncodedTensor(32),), data=EXTENT, tensors=(("float32", EXTENT),)),
    MarkBundle(tensors=(("float32", EXTENT),), key=bytes(KEY_BYTES)),
    ForgetResiduals(),
]
RESULTS = [
    r.Done(),
    r.CommandFailed(code="HP-NUM-001", what="not finite", why="it overflows", fix="use bf16"),
    r.BlockPrepared(dump_bytes=4096),
    r.Loaded(version=3, digest="ab" * 32),
    r.Forwarded(loss=2.5, seconds=0.1),
    r.Forwarded(loss=2.5, seconds=0.1, hits=(3, 16)),
    r.Forwarded(loss=None, seconds=0.1),
    r.Backpropagated(seconds=0.2),
    r.VectorExported(rounded=True),
    r.Summed(unsound=(1,), rounded=False),
    r.Summed(unsound=(), marks=(bytes(NBYTES),)),
    r.Summed(unsound=(), looks=(("cd" * 32, True),)),
    r.Marked(marks=bytes(NBYTES)),
    r.BundleMarked(marks=bytes(NBYTES), exact=bytes(r.DIGEST_BYTES), digest=bytes(r.DIGEST_BYTES)),
    r.Inspected(digest="ab" * 32, squared_norm=1.5, finite=True, seconds=0.1),
    r.Inspected(digest="ab" * 32, squared_norm=1.5, finite=True, seconds=0.1, group_squares=(0.5, 1.0)),
    r.Inspected(digest="ab" * 32, squared_norm=1.5, finite=True, seconds=0.1, pieces=(("cd" * 32, True),)),
    r.UpdateApplied(version=4, digest="ab" * 32, seconds=0.1),
    r.Dumped(nbytes=4096),
    r.Encoded(nbytes=99, written=(EncodedTensor(10, 1, 9),)),
    r.WarmedUp(flops_per_second=1e9),
    r.Rehearsed(seconds=0.3),
    r.WorkerInfo(
        device="cpu",
        device_name="a processor",
        device_uuid="",
        arithmetic="AMD EPYC, AVX512, 1 thread, torch 2.13.0+cpu",
        threads=2,
        rss_bytes=1,
        device_bytes=0,
        device_free_bytes=0,
        device_total_bytes=0,
        blocks=(0, 1),
        tasks=0,
        gpus=0,
    ),
]


def command_bytes(command: Any) -> bytes:
    return encode_message(0, command)[PREFIX.size :]


def result_bytes(result: Any) -> bytes:
    return encode_message(0, result)[PREFIX.size :]


def can_be_said(found: Any) -> None:
    """It is the worker that answers, which runs graphs from the net."""
    same(result_bytes, decode_result)(found)
    if isinstance(found, r.CommandFailed):
        assert len(r.CommandFailedError(found).line()) < 4096


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """However the bytes arrive, the frames are the same."""
    reader, found = FrameReader(), list[tuple[int, bytes]]()
    for begin in range(0, len(data), 7):
        found += reader.feed(data[begin : begin + 7])
    assert FrameReader().feed(data) == found
    return found


TARGETS = {
    "graph": Target(
        decode=read_block,
        refuses=(ProtocolError,),
        seeds=graphs,
        holds=is_block,
    ),
    "graph-run": Target(decode=runs, refuses=(ProtocolError,), seeds=graphs, holds=is_block),
    "state": Target(decode=load, refuses=(ProtocolError,), seeds=states, holds=is_state, max_len=1024),
    "constants": Target(
        decode=constants,
        refuses=(ProtocolError,),
        seeds=lambda: [save({"mask": np.eye(2, dtype=np.bool_), "table": np.arange(3)})],
        holds=are_constants,
        max_len=1024,
    ),
    "shard": Target(decode=shard, refuses=(LocalError,), seeds=shards, holds=has_samples, max_len=1024),
    "tensor": Target(decode=tensor, refuses=(ProtocolError,), seeds=encoded, holds=is_tensor),
    "positions": Target(decode=positions, refuses=(ProtocolError,), seeds=placed, holds=rise, max_len=1024),
    "worker-command": Target(
        decode=decode_command,
        refuses=(ProtocolError,),
        seeds=lambda: map(command_bytes, COMMANDS),
        holds=same(command_bytes, decode_command),
        max_len=1024,
    ),
    "worker-result": Target(
        decode=decode_result,
        refuses=(ProtocolError,),
        seeds=lambda: map(result_bytes, RESULTS),
        holds=can_be_said,
        max_len=1024,
    ),
    "worker-frames": Target(
        decode=frames,
        refuses=(ProtocolError,),
        seeds=lambda: [b"".join(encode_message(number, one) for number, one in enumerate(RESULTS[:4]))],
        max_len=512,
    ),
}
