"""Blocks as bytes: canonical, and hostile bytes give ProtocolError at bounded cost, never anything else."""

import dataclasses
import time
from functools import cache
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import BlockSpec, OperatorCall, Ref, Symbol, TensorSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.graph.structure_check import DEFAULT_LIMITS, GraphLimits
from hetpeer.stages.operators.operators import FAMILIES, operator_of
from hetpeer.stages.tracing.cut import cut_blocks
from tests.amounts import examples
from tests.stages import models

pytestmark = pytest.mark.xdist_group("models")


@cache
def layer() -> BlockSpec:
    return cut_blocks(models.gpt("default")[1])[1]


@cache
def head() -> BlockSpec:
    return cut_blocks(models.gpt("default")[1])[-1]


def document() -> dict:
    return msgpack.unpackb(pack_block(layer()))


def small(*nodes: OperatorCall, **changes) -> bytes:
    """A block with one input `x`, float32 [4, 8], whose output is its last node's value."""
    x = TensorSpec(shape=(4, 8), dtype="float32", grad=False)
    fields = {
        "index": 0,
        "inputs": {"x": x},
        "outputs": {nodes[-1].name: x},
        "data": {},
        "nodes": nodes,
        "parameters": {},
        "parameter_specs": {},
        "buffers": {},
        "buffer_specs": {},
        "batch": 1,
        "flops_forward": 32 * sum(node.op in {"aten.tanh.default", "aten.ones.default"} for node in nodes),
        "activation_bytes": 0,
        "loss": None,
    }
    return pack_block(BlockSpec(**{**fields, **changes}))


def call(name: str, op: str, *args, **kwargs) -> OperatorCall:
    return OperatorCall(name=name, op=op, args=args, kwargs=kwargs)


TANH = call("y", "aten.tanh.default", Ref("x"))


@pytest.mark.parametrize("size", ["default", "deep"])
def test_round_trip_is_exact_and_canonical(size):
    for block in cut_blocks(models.gpt(size)[1]):
        packed = pack_block(block)
        assert unpack_block(packed) == block
        assert pack_block(unpack_block(packed)) == packed
        shuffled = dataclasses.replace(block, parameters=dict(reversed(block.parameters.items())))
        assert pack_block(shuffled) == packed
        assert len(packed) < 4096


def test_blocks_with_buffers_and_constants_round_trip():
    for block in cut_blocks(models.small("no_grad")[1], 4):
        assert unpack_block(pack_block(block)) == block


def test_other_order_of_parameters_is_another_block():
    """The order is the layout of the flat vector."""
    other = dataclasses.replace(layer(), parameter_specs=dict(reversed(layer().parameter_specs.items())))
    assert pack_block(other) != pack_block(layer())


@examples(60)
@given(st.data())
def test_truncated_and_flipped_bytes(data):
    packed = bytearray(pack_block(head()))
    if data.draw(st.booleans()):
        del packed[data.draw(st.integers(0, len(packed) - 1)) :]
    for _ in range(data.draw(st.integers(1, 3))):
        if packed:
            packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    refused_or_true(bytes(packed))


@examples(60)
@given(st.binary(max_size=200))
def test_any_bytes(data):
    with pytest.raises(ProtocolError):
        unpack_block(data)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.sampled_from(
        ["add", "add_1", "float32", "aten.add.Tensor", "aten.as_strided.default", "getitem", "self"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.sampled_from(["ref", "dtype", "memory_format", "text"]), st.text(max_size=3)),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=5,
)


@examples(150)
@given(st.data())
def test_any_value_anywhere_in_the_document(data):
    """Walk to a random place of a good block and put something else there."""
    root = place = msgpack.unpackb(pack_block(head()))
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(place[key], (dict, list)) and place[key]
        if not deeper or data.draw(st.integers(0, 4)) == 0:
            break
        place = place[key]
    place[key] = data.draw(VALUES)
    refused_or_true(msgpack.packb(root))


def refused_or_true(packed: bytes) -> None:
    """Either a ProtocolError, or a block that is what its bytes say."""
    try:
        block = unpack_block(packed)
    except ProtocolError:
        return
    assert pack_block(block) == packed


@examples(80)
@given(
    op=st.sampled_from(sorted(name for family in FAMILIES.values() for name in family)),
    args=st.lists(
        st.one_of(
            st.just(Ref("x")),
            st.none(),
            st.booleans(),
            st.integers(-3, 70),
            st.sampled_from([0, 2**31, 2**62, -(2**63), 2**64 - 1]),
            st.floats(),
            st.lists(st.one_of(st.integers(-1, 2**40), st.just(Ref("x"))), max_size=4).map(tuple),
        ),
        max_size=6,
    ),
)
def test_any_operator_with_any_arguments(op, args):
    """Kernels get arguments of every kind: what they raise, and what they would allocate, stays here."""
    refused_or_true(small(call("y", op, *args)))


def test_a_good_small_block_is_accepted():
    unpack_block(small(TANH))


@pytest.mark.parametrize(
    ("packed", "part"),
    [
        (small(call("y", "os.system", Symbol("text", "none"))), "'os.system'"),
        (small(call("y", "aten.as_strided.default", Ref("x"), (1,), (1,))), "'aten.as_strided.default'"),
        (small(call("y", "aten.empty.memory_format", (4, 8))), "'aten.empty.memory_format'"),
        (small(call("y", "aten.tanh.default", Ref("z"))), "unknown value 'z'"),
        (small(call("y", "aten.tanh.default", Ref("y"))), "unknown value 'y'"),
        (
            small(call("a", "aten.tanh.default", Ref("b")), call("b", "aten.tanh.default", Ref("a"))),
            "unknown value 'b'",
        ),
        (small(TANH, TANH), "'y' is made twice"),
        (small(call("x", "aten.tanh.default", Ref("x"))), "'x' is made twice"),
        (small(TANH, outputs={"z": TensorSpec(shape=(4, 8), dtype="float32")}), "output 'z'"),
        (small(TANH, outputs={"y": TensorSpec(shape=(4, 9), dtype="float32")}), "declared"),
        (small(TANH, outputs={"y": TensorSpec(shape=(4, 8), dtype="float64")}), "declared"),
        (small(TANH, outputs={"y": TensorSpec(shape=(4, 8), dtype="float32", grad=True)}), "declared"),
        (small(TANH, flops_forward=31), "FLOPs"),
        (small(TANH, activation_bytes=2**60), "activations"),
        (small(TANH, loss="y"), "loss"),
        (small(TANH, parameters={"p": "w"}), "names and the parameter specs"),
        (small(call("y", "aten.tanh.default", ((((Ref("x"),),),),))), "nested"),
        (small(call("y", "aten.tanh.default", Ref("x"), out=Ref("x"))), "'out'"),
        (small(call("y", "aten.ones.default", (4, 8), pin_memory=True)), "'pin_memory'"),
        (
            small(call("y", "aten._to_copy.default", Ref("x"), dtype=Symbol("dtype", "complex64"))),
            "complex64",
        ),
        (small(call("y", "aten.add.Tensor", Ref("x"), Symbol("text", "import os"))), "import os"),
        (small(call("y", "aten.view.default", Ref("x"), (5, 5))), "aten.view.default cannot compute 'y'"),
        (small(call("y", "aten.tanh.default", Ref("x"), Ref("x"))), "aten.tanh.default cannot compute"),
        (small(TANH, inputs={"x": TensorSpec(shape=(0, 8), dtype="float32")}), "no tensor"),
        (small(TANH, inputs={"x": TensorSpec(shape=(4, 8), dtype="int64", grad=True)}), "floating-point"),
    ],
)
def test_defects_are_refused_by_name(packed, part):
    with pytest.raises(ProtocolError) as caught:
        unpack_block(packed)
    assert part in caught.value.what


def test_a_name_that_is_a_list_in_a_list_and_so_on():
    packed = small(TANH)
    name = msgpack.packb("inputs") + b"\x91\x92" + msgpack.packb("x")
    assert packed.count(name) == 1
    deep = packed.replace(name, name[:-2] + b"\x91" * 1010 + b"\xc0")
    with pytest.raises(ProtocolError, match="inputs: a text is expected"):
        unpack_block(deep.replace(msgpack.packb([4, 8]), msgpack.packb([0, 8]), 1))


def test_unsorted_or_repeated_keys_are_not_canonical():
    root = document()
    with pytest.raises(ProtocolError, match="canonical"):
        unpack_block(msgpack.packb(dict(reversed(root.items()))))
    with pytest.raises(ProtocolError, match=r"not a block|canonical"):
        unpack_block(pack_block(layer()) + b"\x00")


def tower(count: int) -> bytes:
    """Each node adds a dimension."""
    nodes = [call("n0", "aten.unsqueeze.default", Ref("x"), 0)]
    nodes += [call(f"n{i}", "aten.unsqueeze.default", Ref(f"n{i - 1}"), 0) for i in range(1, count)]
    return small(*nodes)


WIDE = TensorSpec(shape=(2**29,), dtype="float32")
BOMBS = {
    "64 TB of ones": lambda: small(call("y", "aten.ones.default", (2**42, 4))),
    "overflow": lambda: small(call("y", "aten.ones.default", (2**62, 2**62))),
    "long range": lambda: small(call("y", "aten.arange.default", 2**62)),
    "huge input": lambda: small(TANH, inputs={"x": TensorSpec(shape=(2**50,), dtype="float32")}),
    "huge dimensions": lambda: small(
        TANH, inputs={"x": TensorSpec(shape=(2**63, 2**63, 2**63), dtype="float32")}
    ),
    "many parts": lambda: small(call("y", "aten.split.Tensor", Ref("x"), 1), inputs={"x": WIDE}),
    "many chunks": lambda: small(call("y", "aten.chunk.default", Ref("x"), 2**29), inputs={"x": WIDE}),
    "many rows": lambda: small(call("y", "aten.unbind.int", Ref("x")), inputs={"x": WIDE}),
    "tower of dimensions": lambda: tower(10_000),
    "many dimensions": lambda: small(TANH, inputs={"x": TensorSpec(shape=(1,) * 5000, dtype="float32")}),
    "expand": lambda: small(call("y", "aten.expand.default", Ref("x"), (2**20, 2**20, 4, 8))),
    "all results together": lambda: small(
        *(call(f"n{i}", "aten.ones.default", (2**30,)) for i in range(100))
    ),
    "many results": lambda: small(
        *(call(f"n{i}", "aten.unbind.int", Ref("x")) for i in range(10_000)),
        inputs={"x": TensorSpec(shape=(1024,), dtype="float32")},
    ),
    "FLOPs": lambda: small(
        *(call(f"n{i}", "aten.mm.default", Ref("x"), Ref("x")) for i in range(1000)),
        inputs={"x": TensorSpec(shape=(2**15, 2**15), dtype="float32")},
    ),
    "claimed lengths": lambda: b"\xdd\x00\x00\x4e\x20" * 200_000,
    "claimed length": lambda: b"\xdf\xff\xff\xff\xff",
    "deep nesting": lambda: b"\x91" * 500_000,
    "empty lists": lambda: b"\xdc\x4e\x20" + (b"\xdc\x4e\x20" + b"\x90" * 20_000) * 20,
    "too long": lambda: bytes(DEFAULT_LIMITS.packed_bytes + 1),
}
"""Name → its bytes; made by the test alone, since some take a second and megabytes."""


def status_kib(field: str) -> int:
    """A line of /proc/self/status: VmRSS is the memory in use, VmHWM its peak."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(field))


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_little(name):
    bomb = BOMBS[name]()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, began = status_kib("VmRSS"), time.process_time()
    with pytest.raises(ProtocolError):
        unpack_block(bomb)
    assert status_kib("VmHWM") - before < 128 * 1024
    assert time.process_time() - began < 30


def test_every_operator_that_takes_no_tensor_is_told_the_device():
    """Without the device of the dry run such an operator would allocate what a stranger asks for."""
    for name in (name for family in FAMILIES.values() for name in family):
        operator = operator_of(name)
        schema = getattr(operator.run, "_schema", None)
        if schema is not None:
            takes_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
            assert takes_tensor != operator.factory, name


def test_limits_are_the_callers():
    packed = pack_block(layer())
    assert unpack_block(packed, GraphLimits())
    for tight in (
        GraphLimits(packed_bytes=100),
        GraphLimits(items=10),
        GraphLimits(name_length=4),
        GraphLimits(dimensions=2),
        GraphLimits(tensor_bytes=1000),
        GraphLimits(parameter_bytes=1000),
        GraphLimits(result_bytes=1000),
        GraphLimits(flops=1000),
    ):
        with pytest.raises(ProtocolError):
            unpack_block(packed, tight)
