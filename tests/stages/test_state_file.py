"""A state file written and read in pieces: the bytes that safetensors writes, whatever the pieces."""

import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.file_pieces import FilePart, OpenFile
from hetpeer.stages.block import block_state
from hetpeer.stages.block.block_state import BlockState, element_count, split
from hetpeer.stages.block.state_file import StateFile, dump, load, tensor_name, write_state
from tests.amounts import examples

KEPT = ("exp_avg", "exp_avg_sq")
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(
    lambda name: name != "__metadata__" and ":" not in name
)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def filled(layout, kinds, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(1 + len(kinds), element_count(layout)))
    first, *others = vectors.astype(np.float32) + np.float32(9)
    return BlockState(version=7, parameters=first, optimizer=dict(zip(kinds, others, strict=True)))


def whole(state, block, layout):
    """The file as safetensors writes it at once."""
    tensors = {
        tensor_name(kind, name): part
        for kind, vector in state.vectors().items()
        for name, part in split(vector, layout)
    }
    return save(tensors, metadata={"state": f"block {block} version {state.version}"})


@examples(150)
@given(
    layout=st.lists(st.tuples(NAMES, SHAPES), max_size=5, unique_by=lambda one: one[0]),
    size=st.integers(1, 9),
)
def test_pieces_of_any_size_are_the_file_of_safetensors(layout, size):
    state = filled(layout, KEPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_state, "PIECE", size)
        data = dump(state, 2, layout)
        after = load(data, 2, layout, KEPT)
    assert data == whole(state, 2, layout)
    assert after.digest() == state.digest()
    assert after.parameters.tobytes() == state.parameters.tobytes()


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_the_digest_is_of_whole_vectors(monkeypatch, size):
    layout = [("b", (5,)), ("a", (4, 3))]
    state = filled(layout, KEPT)
    hasher = blake3(state.parameters.tobytes())
    for name in KEPT:
        hasher.update(name.encode()).update(state.optimizer[name].tobytes())
    expected = hasher.update((7).to_bytes(8, "little")).hexdigest()
    monkeypatch.setattr(block_state, "PIECE", size)
    assert state.digest() == expected


def test_a_vector_that_is_zero_at_first_is_not_left_out():
    layout = [("a", (3000,))]
    late = np.zeros(3000, np.float32)
    late[2999] = 1.0
    state = BlockState(version=7, parameters=late + 1, optimizer={"exp_avg": late})
    after = load(dump(state, 0, layout), 0, layout, KEPT)
    assert (after.optimizer["exp_avg"] == late).all()


@pytest.fixture
def stored(tmp_path):
    """A state in the middle of a file, and its layout."""
    layout = [("b", (500,)), ("a", (40, 30))]
    state = filled(layout, KEPT)
    file = OpenFile.nameless(tmp_path)
    nbytes = write_state(FilePart(file, 4096, 1 << 20), state, 2, layout)
    return FilePart(file, 4096, nbytes), state, layout


def test_a_file_is_checked_and_loaded_where_it_lies(stored):
    part, state, layout = stored
    file = StateFile(part, 2, layout, KEPT)
    assert file.digest() == file.state().digest() == state.digest()
    with pytest.raises(ProtocolError, match="nobody asked"):
        StateFile(part, 2, layout, ("exp_avg", "other"))


def test_a_file_that_is_cut_short_is_an_error_and_no_signal(stored):
    part, _, layout = stored
    file = StateFile(part, 2, layout, KEPT)
    os.ftruncate(part.file.descriptor, 4096 + part.nbytes - 1)
    with pytest.raises(OSError, match="cut short"):
        file.digest()
    with pytest.raises(OSError, match="cut short"):
        file.state()


def test_a_number_that_is_not_finite_is_found_in_pieces(stored):
    part, _, layout = stored
    os.pwrite(part.file.descriptor, np.float32(np.nan).tobytes(), 4096 + part.nbytes - 4)
    with pytest.raises(ProtocolError, match="not finite"):
        StateFile(part, 2, layout, KEPT).digest()


def test_a_full_disk_is_an_error():
    full = OpenFile(os.open("/dev/full", os.O_RDWR))
    layout = [("a", (40, 30))]
    with pytest.raises(OSError, match="No space"):
        write_state(FilePart(full, 0, 1 << 20), filled(layout, ()), 2, layout)


def test_a_part_is_not_left(tmp_path: Path):
    part = FilePart(OpenFile.nameless(tmp_path), 100, 10)
    with pytest.raises(OSError, match="not in 10 bytes"):
        part.write(5, b"123456")
    assert part.file.nbytes == 0
