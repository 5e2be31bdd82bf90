"""Centered clipping, in place of a sum."""

import pytest
import torch

from hetpeer.stages.worker.vector_sums import centered_clip

HONEST = 0.1
"""How far from each other they are, about."""


@pytest.fixture
def honest():
    torch.manual_seed(0)
    middle = torch.randn(1000)
    return [middle + HONEST * torch.randn(1000) for _ in range(7)]


def mean(parts):
    return torch.stack(parts).mean(dim=0)


def off(parts, truth):
    """Of the clipped mean, relative to how far the honest ones are from theirs."""
    return float((centered_clip(parts) / len(parts) - truth).norm() / (HONEST * 1000**0.5))


@pytest.mark.parametrize("count", [1, 2])
def test_of_few_it_is_the_sum(honest, count):
    assert torch.allclose(centered_clip(honest[:count]), sum(honest[:count]))


def test_where_all_are_alike_it_is_what_they_are():
    one = torch.randn(100)
    assert torch.equal(centered_clip([one] * 4), one * 4)


def test_of_honest_ones_it_is_near_their_mean(honest):
    assert off(honest, mean(honest)) < 0.2


@pytest.mark.parametrize("liars", [1, 2, 3])
@pytest.mark.parametrize(
    "lie",
    [lambda x: -x, lambda x: 1e6 * x, lambda _: torch.full((1000,), 3e38)],
    ids=["opposite", "huge", "most"],
)
def test_less_than_half_move_it_by_no_more_than_the_others_are_apart(honest, liars, lie):
    truth = mean(honest[liars:])
    parts = [*(lie(part) for part in honest[:liars]), *honest[liars:]]
    assert off(parts, truth) < 1.5
    assert float((mean(parts) - truth).norm()) > 1.0, "the mean itself does not hold"


def test_what_is_infinitely_far_has_no_say():
    parts = [torch.full((10,), number) for number in (-2e38, 1.0, 1.0)]
    assert torch.equal(centered_clip(parts), torch.full((10,), 3.0))


def test_parts_stay_as_they_are(honest):
    before = [part.clone() for part in honest]
    centered_clip(honest)
    assert all(map(torch.equal, before, honest))
