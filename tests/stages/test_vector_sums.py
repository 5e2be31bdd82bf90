"""Rounding errors of a codec come back with later vectors; a robust mean is not moved far by a few parts."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.block.exact_numerics import LANES, squared_norm
from hetpeer.stages.links.codec import Codec, EncodedTensor
from hetpeer.stages.links.tensor_codecs import decode
from hetpeer.stages.links.value_codecs import VALUE_CODECS
from hetpeer.stages.worker.holding.stored_vector import InMemory
from hetpeer.stages.worker.vector_sums import CodecLosses, centered_clip, inspect

COUNT = 1000
CODECS = [Codec(values) for values in VALUE_CODECS.values() if not values.of_movements]


def room(codec, count=COUNT):
    assert codec.values is not None
    return memoryview(bytearray(codec.values.nbytes(count)))


def vector(seed, count=COUNT):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(seed=st.integers(0, 1000), begin=st.integers(0, COUNT), end=st.integers(0, COUNT))
def test_the_rounder_knows_what_the_reader_reads(codec, seed, begin, end):
    begin, end = sorted((begin, end))
    piece, data = vector(seed)[begin:end], room(codec, end - begin)
    read = CodecLosses(COUNT).round(codec, piece, data, name="x", plan=1, begin=begin)
    elsewhere = torch.empty(end - begin)
    decode(codec, EncodedTensor(end - begin), data, elsewhere)
    assert torch.equal(read, elsewhere)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_over_many_steps_everything_arrives(codec):
    """In other pieces each time, as shares change."""
    losses, sent, arrived = CodecLosses(COUNT), torch.zeros(COUNT), torch.zeros(COUNT)
    for step in range(50):
        whole, cut = vector(step) + 1.0, 17 * step
        for begin, end in ((0, cut), (cut, COUNT)):
            data = room(codec, end - begin)
            read = losses.round(codec, whole[begin:end], data, name="x", plan=1, begin=begin)
            arrived[begin:end] += read
        losses.settle("x", plan=1)
        sent += whole
    once = (whole - CodecLosses(COUNT).round(codec, whole, room(codec))).abs().max()
    assert once > 0
    assert (sent - arrived).abs().max() < 3 * once, "not more is missing than of one step"


def test_only_the_plan_that_counts_is_settled():
    codec, losses = Codec(VALUE_CODECS["int4"]), CodecLosses(COUNT)
    first = losses.round(codec, vector(1), room(codec), name="x", plan=1)
    losses.round(codec, vector(2)[:10], room(codec, 10), name="x", plan=2)
    losses.settle("x", plan=1)
    assert torch.equal(losses.round(codec, vector(1), room(codec), name="x", plan=1), first)
    losses.settle("x", plan=1)
    with_loss = losses.round(codec, vector(1), room(codec), name="x", plan=3)
    assert not torch.equal(with_loss, first)
    losses.drop("x")
    losses.settle("x", plan=3)
    assert torch.equal(losses.round(codec, vector(1), room(codec), name="x", plan=4), with_loss)


def test_without_a_name_nothing_is_kept():
    codec, losses = Codec(VALUE_CODECS["int4"]), CodecLosses(COUNT)
    first = losses.round(codec, vector(1), room(codec))
    losses.settle("", plan=0)
    assert torch.equal(losses.round(codec, vector(1), room(codec)), first)


def test_what_a_sum_loses_concerns_the_mean():
    codec, losses = Codec(VALUE_CODECS["int8"]), CodecLosses(COUNT)
    read = losses.round(codec, vector(1), room(codec), name="x", plan=1, parts=4)
    losses.settle("x", plan=1)
    lost = (vector(1) - read) / 4
    found = losses.round(
        Codec(VALUE_CODECS["bf16"]),
        torch.zeros(COUNT),
        room(Codec(VALUE_CODECS["bf16"])),
        name="x",
        plan=2,
        parts=2,
    )
    assert torch.equal(found, (2 * lost).bfloat16().float())


def test_what_cannot_be_written_is_sent_as_it_is():
    for codec, wrong in ((Codec(VALUE_CODECS["fp16"]), 1e6), *((codec, float("nan")) for codec in CODECS)):
        losses, piece = CodecLosses(COUNT), vector(1)
        piece[-1] = wrong
        assert losses.round(codec, piece, room(codec), name="x", plan=1) is None
        assert losses.lost("x", 1) is None


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


def test_norms_of_ranges_are_those_of_the_ranges_alone():
    """Ranges that end in a piece, at its end, or later, in any order: the same bits as by themselves."""
    whole = vector(1, 3 * LANES + 17)
    ends = [0, 5, LANES - 1, LANES, LANES + 1, 2 * LANES, 3 * LANES + 3, 3 * LANES + 17]
    ranges = list(itertools.pairwise(ends))
    for chosen in ([ranges[0]], ranges[::2], ranges[::-2], ranges, [(4, 4)], [(7, 3 * LANES)]):
        seen = inspect(InMemory(whole), chosen, [[], chosen[:1]])
        apart = [squared_norm(whole[begin:end]) for begin, end in chosen]
        assert seen.squared_norm == math.fsum(apart)
        assert seen.group_squares == (0.0, apart[0])
