"""Pieces that land in any order and overlap as they like: each element is the sum of what came for it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.peer.training.landed_vector import LandedVector

SIZE = 40
pieces = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=12)


def negative_zeros(count):
    return np.full(count, -0.0, np.float32)


@given(pieces, st.integers(0, 99))
def test_each_element_is_the_sum_of_what_landed_there(ranges, seed) -> None:
    memory, expected = np.full(SIZE, np.nan, np.float32), np.zeros(SIZE, np.float32)
    vector, landed = LandedVector(memory), np.zeros(SIZE, bool)
    draws = np.random.default_rng(seed)
    for begin, end in ranges:
        values = draws.integers(-8, 9, end - begin).astype(np.float32)
        vector.add(begin, values)
        expected[begin:end] += values
        landed[begin:end] = True
    assert np.array_equal(memory[landed], expected[landed])
    assert np.isnan(memory[~landed]).all(), "nothing is written beside the pieces"


def test_the_first_piece_is_not_added_to_zeros() -> None:
    memory = np.ones(4, np.float32)
    vector = LandedVector(memory)
    vector.add(0, negative_zeros(3))
    vector.add(1, negative_zeros(3))
    assert np.signbit(memory).all(), "-0.0 + 0.0 would be 0.0"


def test_a_sum_that_is_not_finite_is_left_to_the_inspection() -> None:
    memory = np.ones(1, np.float32)
    vector = LandedVector(memory)
    for value in (3e38, 3e38):
        vector.add(0, np.full(1, value, np.float32))
    assert np.isinf(memory[0])
