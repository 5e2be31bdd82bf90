"""A block's state survives the trip through bytes, and nothing malformed does."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.execution import state

LAYOUT = [("wte.weight", (4, 3)), ("scale", ()), ("bias", (5,))]
COUNT = 18


def make_state(version: int = 7) -> state.BlockState:
    vectors = np.random.default_rng(0).normal(size=(3, COUNT)).astype(np.float32)
    return state.BlockState(
        version=version, parameters=vectors[0], exp_avg=vectors[1], exp_avg_sq=vectors[2] ** 2
    )


def test_round_trip_keeps_every_bit() -> None:
    before = make_state()
    after = state.load(state.dump(before, 2, LAYOUT), 2, LAYOUT)
    assert after.version == 7
    for left, right in zip(before.vectors(), after.vectors(), strict=True):
        assert left.tobytes() == right.tobytes()
    assert after.digest() == before.digest()


def test_equal_states_are_equal_bytes() -> None:
    assert len({state.dump(make_state(), 2, LAYOUT) for _ in range(20)}) == 1


def test_zero_moments_are_left_out_and_come_back() -> None:
    initial = state.BlockState.initial(make_state().parameters)
    data = state.dump(initial, 0, LAYOUT)
    assert b"exp_avg" not in data
    assert state.load(data, 0, LAYOUT).digest() == initial.digest()


def test_block_without_parameters() -> None:
    empty = state.BlockState.initial(np.zeros(0, np.float32))
    assert state.load(state.dump(empty, 1, []), 1, []).version == 0


@pytest.mark.parametrize("index", [0, 1, 2])
def test_digest_depends_on_every_vector(index: int) -> None:
    before = make_state()
    vectors = [vector.copy() for vector in before.vectors()]
    vectors[index][3] = np.nextafter(vectors[index][3], np.float32(9))
    after = state.BlockState(version=7, parameters=vectors[0], exp_avg=vectors[1], exp_avg_sq=vectors[2])
    assert after.digest() != before.digest()


def test_digest_depends_on_version() -> None:
    assert make_state(7).digest() != make_state(8).digest()


def tensors() -> dict[str, np.ndarray]:
    return {name: np.ones(shape, np.float32) for name, shape in LAYOUT}


LABEL = {"state": "block 2 version 7"}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff" * 40, id="huge header length"),
        pytest.param((2).to_bytes(8, "little") + b"{}", id="no tensors"),
        pytest.param(save(tensors()), id="no label"),
        pytest.param(save(tensors(), metadata={"state": "block 3 version 7"}), id="other block"),
        pytest.param(save(tensors(), metadata={"state": "block 2 version -1"}), id="negative version"),
        pytest.param(save(tensors(), metadata={"state": "block 2 version ٣"}), id="foreign digits"),
        pytest.param(save(tensors() | {"extra": np.ones(1, np.float32)}, metadata=LABEL), id="extra tensor"),
        pytest.param(save(tensors() | {"scale": np.ones((), np.float64)}, metadata=LABEL), id="dtype"),
        pytest.param(save(tensors() | {"scale": np.ones(1, np.float32)}, metadata=LABEL), id="shape"),
        pytest.param(
            save(tensors() | {"exp_avg:scale": np.ones((), np.float32)}, metadata=LABEL),
            id="half the moments",
        ),
        pytest.param(
            save(tensors() | {"scale": np.full((), np.nan, np.float32)}, metadata=LABEL), id="not finite"
        ),
        pytest.param(save(tensors() | {"bias": np.ones(500, np.float32)}, metadata=LABEL), id="too large"),
        pytest.param(save(tensors(), metadata=LABEL)[:-1], id="cut short"),
    ],
)
def test_malformed_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        state.load(data, 2, LAYOUT)


def test_deep_header_is_refused() -> None:
    header = json.dumps({"__metadata__": LABEL}).encode()[:-1] + b',"x":' + b"[" * 1500
    with pytest.raises(ProtocolError):
        state.load(len(header).to_bytes(8, "little") + header, 2, LAYOUT)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_damage_gives_protocol_error_or_another_valid_state(position: int, value: int, cut: int) -> None:
    data = bytearray(state.dump(make_state(), 2, LAYOUT))
    data[position % len(data)] = value
    try:
        loaded = state.load(bytes(data[: len(data) - cut % 3]), 2, LAYOUT)
    except ProtocolError:
        return
    assert loaded.parameters.shape == (COUNT,)
