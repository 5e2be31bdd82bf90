"""The data order is a pure function whose values are part of the format: they may never change."""

import numpy as np
import pytest

from hetpeer.stages.data.order import sample_offsets


def test_known_values() -> None:
    assert sample_offsets(7, "train", 3, 2, 4, 1000).tolist() == [940, 718, 253, 269]
    assert sample_offsets(7, "evaluation", 0, 2, 4, 1000).tolist() == [594, 922, 467, 208]


def test_every_argument_but_the_evaluation_step_matters() -> None:
    base = (7, "train", 3, 2, 8, 10**6)
    changed = [
        (8, *base[1:]),
        (7, "train", 4, *base[3:]),
        (7, "train", 3, 3, 8, 10**6),
        (7, "evaluation", *base[2:]),
    ]
    draws = {sample_offsets(*arguments).tobytes() for arguments in [base, *changed]}
    assert len(draws) == 5
    early, late = (sample_offsets(7, "evaluation", step, 2, 8, 10**6) for step in (0, 999))
    assert (early == late).all()


@pytest.mark.parametrize("population", [1, 2, 1000, 2**40])
def test_offsets_stay_inside(population: int) -> None:
    offsets = sample_offsets(0, "train", 0, 0, 1000, population)
    assert offsets.dtype == np.int64
    assert 0 <= offsets.min() <= offsets.max() < population


def test_offsets_are_spread_evenly() -> None:
    offsets = np.concatenate([sample_offsets(1, "train", step, 0, 100, 10) for step in range(100)])
    counts = np.bincount(offsets, minlength=10)
    assert abs(counts - 1000).max() < 150  # five standard deviations of a fair draw


def test_large_seed_step_and_microbatch() -> None:
    assert sample_offsets(2**63, "train", 2**40, 2**30, 2, 10).shape == (2,)
