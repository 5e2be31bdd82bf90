"""Fingerprints: they add up, they are about as far apart as what they are of, and without the key nobody
can meet one.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.block.fingerprint import NBYTES, PLACES, distance, fingerprint, pack, unpack
from tests.amounts import examples

KEY = bytes(range(16))


def noise(length, seed=0):
    return np.random.default_rng(seed).standard_normal(length).astype(np.float32)


@examples(60)
@given(st.integers(1, 3000), st.integers(0, 5000), st.lists(st.integers(0, 3000), max_size=4))
def test_those_of_pieces_add_up_to_that_of_the_whole(length, begin, cuts):
    whole = noise(length)
    borders = sorted({0, length, *(min(cut, length) for cut in cuts)})
    pieces = [fingerprint(whole[i:j], 3, begin + i, KEY) for i, j in pairwise(borders)]
    assert np.allclose(sum(pieces), fingerprint(whole, 3, begin, KEY), rtol=0, atol=1e-9)


def test_a_long_vector_is_that_of_its_rows():
    """Longer than what is done at once, from the middle of a row on."""
    vector = noise(300_000)
    parts = fingerprint(vector[:77], 0, 1000, KEY) + fingerprint(vector[77:], 0, 1077, KEY)
    assert np.allclose(parts, fingerprint(vector, 0, 1000, KEY), rtol=0, atol=1e-8)


def test_its_length_is_that_of_the_vector():
    """On average; with a deviation of sqrt(2 / 256) = 9 % of the square."""
    vector = noise(20_000)
    squares = [np.sum(fingerprint(vector, 0, 0, key.to_bytes(16, "big")) ** 2) for key in range(200)]
    true = float(np.sum(vector.astype(np.float64) ** 2))
    assert np.mean(squares) / true == pytest.approx(1.0, abs=0.03)
    assert np.std(squares) / true == pytest.approx(math.sqrt(2 / PLACES), rel=0.3)


def test_what_is_false_is_far_away_and_what_is_rounded_is_near():
    true = noise(100_000)
    seen = pack(fingerprint(true, 1, 512, KEY))

    def apart(vector):
        return distance(seen, pack(fingerprint(vector.astype(np.float32), 1, 512, KEY)))

    assert apart(true) == 0.0
    assert apart(-true) == pytest.approx(2.0)
    assert apart(10 * true) == pytest.approx(9.0)
    assert apart(noise(100_000, seed=1)) == pytest.approx(math.sqrt(2), rel=0.2)
    assert apart(true * np.float32(1 + 1e-6)) < 1e-5
    one = true.copy()
    one[77] += 100.0
    assert apart(one) == pytest.approx(100.0 / np.linalg.norm(true), rel=0.2)


def test_keys_and_blocks_have_signs_of_their_own():
    vector = noise(5000)
    first = fingerprint(vector, 0, 0, KEY)
    for other in (fingerprint(vector, 1, 0, KEY), fingerprint(vector, 0, 0, bytes(16))):
        assert distance(pack(first), pack(other)) > 1.0


def test_what_is_no_fingerprint_is_infinitely_far_away():
    sound = pack(np.ones(PLACES))
    broken = np.ones(PLACES)
    broken[5] = np.nan
    for wrong in (b"", sound[:-8], sound + bytes(8), b"x", pack(broken)):
        assert distance(sound, wrong) == distance(wrong, sound) == math.inf
    zeros = bytes(NBYTES)
    assert distance(zeros, zeros) == 0.0
    assert distance(zeros, sound) == math.inf
    assert np.array_equal(unpack(sound), np.ones(PLACES))
