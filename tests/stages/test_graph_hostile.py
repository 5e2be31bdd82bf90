"""A block's sizes, flags, statistics and hetpeer's own operators, from a stranger: ProtocolError, and
nothing is allocated.
"""

import contextlib
import copy
import math
import time
from functools import cache
from pathlib import Path

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.amounts import examples


class All(nn.Module):
    """All that hetpeer has an operator of its own for."""

    def __init__(self):
        super().__init__()
        self.first, self.parts = nn.Linear(8, 8), nn.Linear(8, 24)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x):
        h = self.drop(self.norm(self.first(x))) * self.scale
        query, key, value = self.parts(h).view(-1, 1, 1, 24).split(8, dim=3)
        return (nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5) ** 2).mean()


@cache
def good() -> bytes:
    (block,) = cut_blocks(trace(All(), {"x": torch.randn(4, 8)}), 1)
    return pack_block(block)


def refused(change) -> None:
    document = msgpack.unpackb(good())
    change(document)
    with pytest.raises(ProtocolError):
        unpack_block(msgpack.packb(document))


def node(document, op):
    return next(node for node in document["nodes"] if node[1] == op)


def argument(op, position, value):
    def change(document):
        node(document, op)[2][position] = value

    return change


def entry(name, value):
    return lambda document: document.__setitem__(name, value)


def test_the_block_is_good_as_it_is():
    document = msgpack.unpackb(good())
    unpack_block(msgpack.packb(document))
    for op in ("hetpeer.dropout", "hetpeer.attention", "hetpeer.batch_norm", "aten.view.default"):
        assert node(document, op)


# ── operators of our own ────────────────────────────────────────────────────────────────────────────────────

NO_NUMBERS = [None, "x", {"ref": "x"}, {"ref": "nobody"}, [0.5], {"text": "none"}, {"text": "x"}]
DROPOUT, ATTENTION, BATCH_NORM = "hetpeer.dropout", "hetpeer.attention", "hetpeer.batch_norm"


@pytest.mark.parametrize("place", [(DROPOUT, 1), (ATTENTION, 4)])
@pytest.mark.parametrize("value", [*NO_NUMBERS, -0.5, 1, 1.0, 7.0, math.nan, math.inf, True, 2**62])
def test_probabilities(place, value):
    refused(argument(*place, value))


@pytest.mark.parametrize("place", [(DROPOUT, 2), (ATTENTION, 6)])
@pytest.mark.parametrize(
    "value", [*NO_NUMBERS, -1, 2**32, 2**63, 2**64 - 1, 0.0, 1.5, True, {"batch": 2**40}]
)
def test_numbers_of_operators(place, value):
    refused(argument(*place, value))


@pytest.mark.parametrize("place", [(BATCH_NORM, 5), (BATCH_NORM, 6)])
@pytest.mark.parametrize("value", [*NO_NUMBERS, -0.1, math.nan, math.inf, True])
def test_momentum_and_epsilon(place, value):
    refused(argument(*place, value))


@pytest.mark.parametrize("op", [DROPOUT, ATTENTION, BATCH_NORM])
def test_too_few_and_too_many_arguments(op):
    for count in range(len(node(msgpack.unpackb(good()), op)[2])):
        refused(lambda document, count=count: node(document, op)[2].__delitem__(slice(count, None)))
    refused(lambda document: node(document, op)[2].extend([1, 1]))


# ── statistics ──────────────────────────────────────────────────────────────────────────────────────────────

MEAN, VARIANCE = {"ref": "b_norm_running_mean"}, {"ref": "b_norm_running_var"}


def statistic(change):
    """A change of the first statistic's [shape, dtype, grad]."""
    return lambda document: change(document["statistic_specs"][0][1])


@pytest.mark.parametrize(
    "change",
    [
        statistic(lambda spec: spec.__setitem__(0, [9])),
        statistic(lambda spec: spec.__setitem__(0, [])),
        statistic(lambda spec: spec.__setitem__(0, [8, 1])),
        statistic(lambda spec: spec.__setitem__(0, [2**40])),
        statistic(lambda spec: spec.__setitem__(0, [{"batch": 2}])),
        statistic(lambda spec: spec.__setitem__(1, "float64")),
        statistic(lambda spec: spec.__setitem__(2, True)),
        argument(BATCH_NORM, 3, VARIANCE),
        argument(BATCH_NORM, 3, None),
        argument(BATCH_NORM, 3, {"ref": "first.bias"}),
        argument(BATCH_NORM, 3, {"ref": "b_scale"}),
        argument(BATCH_NORM, 1, MEAN),
        argument(DROPOUT, 0, MEAN),
        lambda document: document["statistics"].pop(MEAN["ref"]),
        lambda document: document["statistics"].update({MEAN["ref"]: "norm.running_var"}),
        lambda document: document["statistics"].update({"more": "norm.running_mean"}),
        lambda document: document["statistic_specs"].pop(),
        lambda document: document["statistic_specs"].append(document["buffer_specs"][0]),
        entry("statistics", []),
        entry("statistic_specs", {}),
    ],
)
def test_statistics_belong_to_one_batch_norm_each(change):
    refused(change)


# ── sizes and flags ─────────────────────────────────────────────────────────────────────────────────────────

SIZES = [
    *({"batch": value} for value in (0, -1, True, 1.0, None, "1", 2**62, 2**63, {"batch": 1}, [1])),
    *({}, {"batch": 1, "more": 1}, {"Batch": 1}, {1: 1}, -1, 2**63, 1.0, None, "8"),
]


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    refused(lambda document: document["data"][0][1][0].__setitem__(0, size))
    refused(lambda document: document["parameter_specs"][0][1][0].__setitem__(0, size))


@pytest.mark.parametrize(
    "size", [{"batch": 3}, {"batch": 2**62}, {"batch": 0}, {"batch": 1.5}, {"batch": None}]
)
def test_sizes_in_arguments(size):
    refused(lambda document: node(document, "aten.view.default")[2][1].__setitem__(0, size))


@pytest.mark.parametrize("kind", ["parameter_specs", "buffer_specs", "statistic_specs"])
def test_what_a_block_owns_has_fixed_sizes(kind):
    refused(lambda document: document[kind][0][1][0].__setitem__(0, {"batch": 2}))


@pytest.mark.parametrize("batch", [0, -1, 2**20 + 1, 2**62, True, 1.0, None, "4", {"batch": 1}, [4]])
def test_samples_of_a_microbatch(batch):
    refused(entry("batch", batch))


@pytest.mark.parametrize("name", ["autocast", "recompute"])
@pytest.mark.parametrize("value", [0, 1, 1.0, None, "yes", [], [True], {}])
def test_flags(name, value):
    refused(entry(name, value))


def test_entries():
    for name in msgpack.unpackb(good()):
        refused(lambda document, name=name: document.pop(name))
    refused(entry("more", 1))


# ── anything, anywhere ──────────────────────────────────────────────────────────────────────────────────────

HOSTILE = st.one_of(
    st.sampled_from([*NO_NUMBERS, *SIZES, MEAN, {"ref": "b_scale"}, "hetpeer.dropout", "hetpeer.batch_norm"]),
    st.sampled_from([math.nan, math.inf, 2**31, 2**62, -(2**63), 2**64 - 1, b"", "float16", "bool", "int8"]),
    st.integers(-2, 40),
    st.floats(),
)


def places(value, at=()):
    """Every place in a document."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (*at, key)
        if isinstance(value[key], (dict, list)):
            yield from places(value[key], (*at, key))


@examples(400)
@given(st.data())
def test_any_hostile_values_anywhere(data):
    """Up to three at once; a block that is taken is what its bytes say, and memory and time stay small."""
    document = msgpack.unpackb(good())
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(list(places(document))))
        inner = document
        for key in way:
            inner = inner[key]
        inner[last] = copy.deepcopy(data.draw(HOSTILE))  # twice the same object would nest in itself
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, began = status_kib("VmRSS"), time.process_time()
    packed = msgpack.packb(document)
    with contextlib.suppress(ProtocolError):
        assert pack_block(unpack_block(packed)) == packed
    assert status_kib("VmHWM") - before < 128 * 1024
    assert time.process_time() - began < 10


def status_kib(field: str) -> int:
    """A line of /proc/self/status: VmRSS is the memory in use, VmHWM its peak."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(field))
