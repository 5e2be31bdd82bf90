"""A block's state survives the trip through bytes, and nothing malformed does."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block import block_state, state_file
from tests.amounts import examples

LAYOUT = [("wte.weight", (4, 3)), ("scale", ()), ("bias", (5,))]
COUNT = 18


KEPT = ("exp_avg", "exp_avg_sq")


def make_state(version: int = 7, kept: tuple[str, ...] = KEPT) -> block_state.BlockState:
    vectors = np.random.default_rng(0).normal(size=(1 + len(kept), COUNT)).astype(np.float32)
    return block_state.BlockState(
        version=version, parameters=vectors[0], optimizer=dict(zip(kept, vectors[1:], strict=True))
    )


@pytest.mark.parametrize("kept", [(), ("momentum_buffer",), KEPT, (*KEPT, "outer_anchor", "outer_momentum")])
def test_round_trip_keeps_every_bit(kept: tuple[str, ...]) -> None:
    before = make_state(kept=kept)
    data = state_file.dump(before, 2, LAYOUT)
    assert len(data) <= state_file.file_bytes(LAYOUT, 1 + len(kept))
    after = state_file.load(data, 2, LAYOUT, kept)
    assert after.version == 7
    assert before.vectors().keys() == after.vectors().keys() == {"", *kept}
    for name, vector in before.vectors().items():
        assert vector.tobytes() == after.vectors()[name].tobytes()
    assert after.digest() == before.digest()


def test_what_this_runs_optimizer_does_not_keep_is_refused() -> None:
    with pytest.raises(ProtocolError, match="nobody asked"):
        state_file.load(
            state_file.dump(make_state(), 2, LAYOUT), 2, LAYOUT, ("exp_avg", "momentum_buffer", "other")
        )


def test_equal_states_are_equal_bytes() -> None:
    assert len({state_file.dump(make_state(), 2, LAYOUT) for _ in range(20)}) == 1


def test_zeros_are_left_out_and_come_back() -> None:
    initial = block_state.BlockState(version=0, parameters=make_state().parameters)
    zeros = dict.fromkeys(KEPT, np.zeros(COUNT, np.float32))
    held = block_state.BlockState(version=0, parameters=initial.parameters, optimizer=zeros)
    data = state_file.dump(held, 0, LAYOUT)
    assert data == state_file.dump(initial, 0, LAYOUT)
    assert held.digest() == initial.digest() == state_file.load(data, 0, LAYOUT, KEPT).digest()


def test_block_without_parameters() -> None:
    empty = block_state.BlockState(version=0, parameters=np.zeros(0, np.float32))
    assert state_file.load(state_file.dump(empty, 1, []), 1, [], KEPT).version == 0


@pytest.mark.parametrize("name", ["", *KEPT])
def test_digest_depends_on_every_vector(name: str) -> None:
    before = make_state()
    after = make_state()
    vector = after.vectors()[name]
    vector[3] = np.nextafter(vector[3], np.float32(9))
    assert after.digest() != before.digest()


def test_digest_depends_on_which_vector_it_is() -> None:
    before = make_state()
    first, second = (before.optimizer[name] for name in KEPT)
    exchanged = dict(zip(KEPT, (second, first), strict=True))
    after = block_state.BlockState(version=7, parameters=before.parameters, optimizer=exchanged)
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
        state_file.load(data, 2, LAYOUT, KEPT)


def test_deep_header_is_refused() -> None:
    header = json.dumps({"__metadata__": LABEL}).encode()[:-1] + b',"x":' + b"[" * 1500
    with pytest.raises(ProtocolError):
        state_file.load(len(header).to_bytes(8, "little") + header, 2, LAYOUT, KEPT)


@examples(300)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_damage_gives_protocol_error_or_another_valid_state(position: int, value: int, cut: int) -> None:
    data = bytearray(state_file.dump(make_state(), 2, LAYOUT))
    data[position % len(data)] = value
    try:
        loaded = state_file.load(bytes(data[: len(data) - cut % 3]), 2, LAYOUT, KEPT)
    except ProtocolError:
        return
    assert loaded.parameters.shape == (COUNT,)


def test_joined_vectors_are_read_where_they_lie_unless_a_piece_is_of_several() -> None:
    parts = [np.arange(3, dtype=np.float32), np.arange(3, 8, dtype=np.float32)]
    joined = block_state.Joined([block_state.Whole(part) for part in parts])
    for begin in range(8):
        for end in range(begin, 9):
            assert joined.read(begin, end).tolist() == list(range(begin, end))
    assert np.shares_memory(joined.read(3, 8), parts[1])
    assert not np.shares_memory(joined.read(2, 4), parts[1])
