"""Devices that are near each other: orders in which they come one after the other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.planning.device_clusters import by_halves, chain, communities, together

SEEDS = st.integers(0, 10_000)


def cities(sizes, seed: int):
    """Devices in cities, fifty times nearer and more to their own than to others, in any order: (city of
    each, seconds).
    """
    random = np.random.default_rng(seed)
    city = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    near = random.uniform(0.5, 1.0, (len(city), len(city)))
    far = random.uniform(50.0, 100.0, (len(sizes), len(sizes)))
    return city, np.where(city[:, None] == city, near, far[np.ix_(city, city)])


def modularity(weights: np.ndarray, own) -> float:
    """Newman's, in plain loops: sum over pairs of one community of w / 2m - degrees / 4m²."""
    total, degree = weights.sum(), weights.sum(axis=1)
    found = 0.0
    for one in range(len(own)):
        for other in range(len(own)):
            if own[one] == own[other]:
                found += weights[one, other] / total - degree[one] * degree[other] / total**2
    return found


def pieces(order, own) -> int:
    """Runs of devices of the same community."""
    names = np.asarray(own)[order]
    return 1 + int((names[1:] != names[:-1]).sum())


@given(st.lists(st.integers(2, 6), min_size=2, max_size=5), SEEDS)
def test_cities_are_communities_and_no_chain_leaves_one_before_its_end(sizes, seed):
    city, seconds = cities(sizes, seed)
    levels = communities(seconds, np.random.default_rng(seed))
    apart = together(seconds, np.random.default_rng(seed))
    for own in (levels[0], city):
        assert pieces(chain(apart, 0), own) == own.max() + 1
    assert all(len(set(city[levels[0] == one])) == 1 for one in levels[0])


@given(st.integers(2, 12), SEEDS)
def test_nobody_alone_would_rather_be_in_another_community(count, seed):
    seconds = np.exp(np.random.default_rng(seed).normal(0, 2, (count, count)))
    levels = communities(seconds, np.random.default_rng(seed))
    weights = 1 / (seconds + seconds.T)
    np.fill_diagonal(weights, 0.0)
    before = -math.inf
    for own in levels:
        assert modularity(weights, own) > before
        before = modularity(weights, own)
    for device in range(count if levels else 0):
        for there in range(count):
            moved = levels[0].copy()
            moved[device] = there
            assert modularity(weights, moved) <= modularity(weights, levels[0]) + 1e-9


@given(st.integers(1, 8), SEEDS)
def test_halves_of_equal_cities_come_apart(size, seed):
    city, seconds = cities([size] * 4, seed)
    assert pieces(by_halves(seconds), city) == 4


@given(st.integers(1, 10), SEEDS, st.floats(0.0, 1.0))
def test_everybody_is_in_an_order_once_whoever_reaches_whom(count, seed, part):
    """Also where nobody reaches anybody, or everything is free."""
    random = np.random.default_rng(seed)
    holes = random.random((count, count)) < part
    for seconds in (np.where(holes, np.inf, random.random((count, count))), np.zeros((count, count))):
        apart = together(seconds, random)
        for order in (chain(seconds, 0), chain(apart, count - 1), by_halves(seconds)):
            assert sorted(order.tolist()) == list(range(count))


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_says_it_all(seed):
    seconds = np.random.default_rng(seed).random((40, 40))
    one, other = (communities(seconds, np.random.default_rng(seed)) for _ in range(2))
    assert len(one) == len(other)
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
