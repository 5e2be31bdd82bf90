"""State and constants files from strangers: their headers lie in every way that safetensors allows to
write down.
"""

import contextlib
import copy
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.file_pieces import InMemory, read
from hetpeer.stages.block import state_file
from hetpeer.stages.block.tensor_file import read_constants
from hetpeer.stages.graph.block_spec import SAFETENSORS, TensorSpec
from tests.amounts import examples

KEPT = ("exp_avg", "exp_avg_sq")
LAYOUT = [("b", (5,)), ("s", ()), ("w", (4, 3))]
GOOD = save(
    {name: np.ones(shape, np.float32) for name, shape in LAYOUT}, metadata={"state": "block 2 version 7"}
)
LENGTH = int.from_bytes(GOOD[:8], "little")
HEADER, BODY = json.loads(GOOD[8 : 8 + LENGTH]), GOOD[8 + LENGTH :]
SPECS = {name: TensorSpec(shape=shape, dtype="float32") for name, shape in LAYOUT}


def load_constants(data, specs):
    stored = read_constants(InMemory(data), specs)
    return {name: bytes(read(tensor, 0, tensor.nbytes)) for name, tensor in stored.items()}


def file_of(header, body: bytes = BODY) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def changed(*path, to) -> bytes:
    header = copy.deepcopy(HEADER)
    inner = header
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return file_of(header)


TEXT = json.dumps(HEADER).encode()
LIES = {
    "no constants, no state": b"",
    "a few bytes": GOOD[:7],
    "header cut": GOOD[: 8 + LENGTH // 2],
    "body cut": GOOD[:-1],
    "body too long": GOOD + b"\0\0\0\0",
    **{
        f"header of {n}": n.to_bytes(8, "little") + GOOD[8:]
        for n in (0, 1, LENGTH + 9, 2**31, 2**63, 2**64 - 1)
    },
    **{
        f"offsets {offsets}": changed("w", "data_offsets", to=offsets)
        for offsets in (
            *(
                [0, 48],
                [23, 71],
                [25, 73],
                [24, 76],
                [24, 68],
                [72, 24],
                [-4, 44],
                [24, 2**63],
                [2**63, 2**63 + 48],
            ),
            *([24.0, 72.0], [24], [24, 48, 72], None, "24", {"24": 72}),
        )
    },
    "two tensors in one place": changed("b", "data_offsets", to=[24, 44]),
    **{
        f"shape {shape}": changed("w", "shape", to=shape)
        for shape in (
            *([12, 1, 1, 2], [2**32, 2**32], [-1, 12], [-4, -3], [2**63, 2, 0], [0], [], [4.0, 3], [4, True]),
            *(None, "4,3", 12, [[4], [3]]),
        )
    },
    **{
        f"dtype {dtype}": changed("w", "dtype", to=dtype)
        for dtype in ("F64", "I32", "BF16", "F8_E4M3", "f32", "F32 ", "", None, 5, ["F32"])
    },
    "no entry": changed("w", to={}),
    "a number": changed("w", to=5),
    "a list for a header": file_of([HEADER]),
    "a text for a header": file_of("w"),
    "a name twice": file_of(TEXT[:-1] + b',"w":{"dtype":"F32","shape":[4,3],"data_offsets":[0,48]}}'),
    "no UTF-8": file_of(TEXT.replace(b'"w"', b'"\xff"')),
    "half a character": file_of(TEXT.replace(b'"w"', b'"\\ud800"')),
    "more after it": file_of(TEXT + b"x"),
    "no JSON": file_of(TEXT[:-1] + b',"x":NaN}'),
    "deep": file_of(TEXT[:-1] + b',"x":' + b"[" * 400 + b"]" * 400 + b"}"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_of_the_header(lie):
    for load in (
        lambda data: state_file.load(data, 2, LAYOUT, KEPT),
        lambda data: load_constants(data, SPECS),
    ):
        with pytest.raises(ProtocolError):
            load(LIES[lie])


@pytest.mark.parametrize(
    "metadata", [None, {}, [], "x", 5, {"state": None}, {"state": 7}, {"state": ["block 2 version 7"]}]
)
def test_lies_about_the_block(metadata):
    with pytest.raises(ProtocolError):
        state_file.load(changed("__metadata__", to=metadata), 2, LAYOUT, KEPT)


def test_what_is_not_a_lie():
    assert state_file.load(GOOD, 2, LAYOUT, KEPT).version == 7
    constants = load_constants(GOOD, {name: SPECS[name] for name in ("w", "s")})
    assert constants == {"w": np.ones(12, np.float32).tobytes(), "s": np.ones(1, np.float32).tobytes()}
    assert load_constants(GOOD, {}) == {}


def test_constants_of_every_dtype():
    import torch
    from safetensors.torch import save as save_torch

    tensors = {dtype: torch.zeros(3, dtype=getattr(torch, dtype)) for dtype in SAFETENSORS}
    specs = {dtype: TensorSpec(shape=(3,), dtype=dtype) for dtype in tensors}
    loaded = load_constants(save_torch(tensors), specs)
    assert {name: len(raw) for name, raw in loaded.items()} == {
        name: spec.nbytes for name, spec in specs.items()
    }


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**64), 2**64), st.floats(), st.text(max_size=3), st.just("F32")
)


@examples(200)
@given(st.data())
def test_any_value_anywhere_in_the_header(data):
    """Memory stays that of the true state, whatever the header claims."""
    header = copy.deepcopy(HEADER)
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from([*HEADER, "more"]))
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "state"]))
        value = data.draw(st.one_of(JUNK, st.lists(JUNK, max_size=3)))
        header.setdefault(name, {})[key] = value
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, began = status_kib("VmRSS"), time.process_time()
    for load in (
        lambda data: state_file.load(data, 2, LAYOUT, KEPT),
        lambda data: load_constants(data, SPECS),
    ):
        with contextlib.suppress(ProtocolError):
            load(file_of(header))
    assert status_kib("VmHWM") - before < 32 * 1024
    assert time.process_time() - began < 5


def status_kib(field: str) -> int:
    """A line of /proc/self/status: VmRSS is the memory in use, VmHWM its peak."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(field))
