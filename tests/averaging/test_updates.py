"""The update rule: AdamW by the paper, and equal bits wherever it runs."""

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpeer.averaging import updates
from hetpeer.averaging.updates import AdamW, AdamWSettings
from hetpeer.dht.errors import LocalError
from hetpeer.stages.execution import numerics
from hetpeer.stages.execution.numerics import is_finite, squared_norm

SETTINGS = AdamWSettings(learning_rate=3e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gradients(size, steps, seed=1):
    """Gradients over many magnitudes, zeros and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        scale = 10.0 ** torch.randint(-42, 3, (size,), generator=generator).double()
        yield (torch.randn(size, generator=generator).double() * scale).float()


def train(size, steps, *, coefficient=1.0, offset=0):
    """Parameters and moments after some steps, in vectors that begin `offset` elements into their memory."""
    start = torch.randn(size, generator=torch.Generator().manual_seed(0))
    memory = [torch.zeros(size + offset) for _ in range(3)]
    parameters, exp_avg, exp_avg_sq = (vector[offset:] for vector in memory)
    parameters.copy_(start)
    rule = AdamW(SETTINGS)
    for step, gradient in enumerate(gradients(size, steps), start=1):
        rule.apply(
            parameters=parameters,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            gradient=gradient,
            coefficient=coefficient,
            step=step,
        )
    return [bytes(vector.numpy().data.cast("B")) for vector in (parameters, exp_avg, exp_avg_sq)]


def ieee(size, steps, coefficient):
    """The same chain in numpy, where each operator is one IEEE operation on float32 by construction."""
    f32 = np.float32
    one = SETTINGS
    beta1, beta2 = one.betas
    parameters = torch.randn(size, generator=torch.Generator().manual_seed(0)).numpy()
    exp_avg, exp_avg_sq = np.zeros(size, f32), np.zeros(size, f32)
    for step, raw in enumerate(gradients(size, steps), start=1):
        gradient = raw.numpy() * f32(coefficient)
        parameters = parameters * f32(1 - one.learning_rate * one.weight_decay)
        exp_avg = exp_avg + (gradient - exp_avg) * f32(1 - beta1)
        exp_avg_sq = exp_avg_sq * f32(beta2) + gradient * gradient * f32(1 - beta2)
        denominator = np.sqrt(exp_avg_sq) * f32(1 / math.sqrt(1 - beta2**step)) + f32(one.epsilon)
        parameters = parameters + exp_avg / denominator * f32(-one.learning_rate / (1 - beta1**step))
    return [vector.tobytes() for vector in (parameters, exp_avg, exp_avg_sq)]


@pytest.mark.parametrize("size", [1, 7, 1001, 70_003])
def test_bits_are_those_of_single_ieee_operations(size):
    assert train(size, 4, coefficient=0.37) == ieee(size, 4, 0.37)


def test_bits_do_not_depend_on_threads_chunks_or_alignment(monkeypatch):
    size = 2 * updates.CHUNK + 12_345
    with threads(1):
        expected = train(size, 2)
    with threads(2):
        assert train(size, 2) == expected
    assert train(size, 2, offset=3) == expected
    monkeypatch.setattr(updates, "CHUNK", 33_331)
    assert train(size, 2) == expected


def test_follows_torch_adamw():
    generator = torch.Generator().manual_seed(5)
    size = 5_000
    mine = torch.randn(size, generator=generator)
    theirs = mine.clone().requires_grad_()
    exp_avg, exp_avg_sq = torch.zeros(size), torch.zeros(size)
    optimizer = torch.optim.AdamW(
        [theirs],
        lr=SETTINGS.learning_rate,
        betas=SETTINGS.betas,
        eps=SETTINGS.epsilon,
        weight_decay=SETTINGS.weight_decay,
        foreach=False,
    )
    rule = AdamW(SETTINGS)
    for step in range(1, 51):
        gradient = torch.randn(size, generator=generator)
        theirs.grad = gradient.clone()
        optimizer.step()
        rule.apply(
            parameters=mine,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            gradient=gradient,
            coefficient=1.0,
            step=step,
        )
        difference = (mine - theirs.detach()).abs().max()
        assert difference <= step * 1e-7 * theirs.detach().abs().max()


@given(base=st.floats(0, 0.9999), exponent=st.integers(1, 100_000))
def test_power_is_a_power(base, exponent):
    assert numerics.power(base, exponent) == pytest.approx(base**exponent, rel=1e-9, abs=1e-300)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 5000), lanes=st.sampled_from([1, 2, 64, 4096]), seed=st.integers(0, 2**31))
def test_squared_norm_is_accurate_for_any_width(size, lanes, seed):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "LANES", lanes)
        found = squared_norm(flat)
    assert found == pytest.approx(math.fsum(float(x) ** 2 for x in flat), rel=1e-13)


def test_squared_norm_is_the_fixed_tree_for_any_thread_count():
    flat = next(iter(gradients(3 * numerics.LANES + 77, 1)))
    padded = np.zeros(4 * numerics.LANES)
    padded[: len(flat)] = flat.double().numpy()
    lanes = np.zeros(numerics.LANES)
    for row in padded.reshape(4, -1):
        lanes = lanes + row * row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    for count in (1, 2):
        with threads(count):
            assert squared_norm(flat) == lanes[0]
    assert squared_norm(torch.cat([torch.zeros(5), flat])[5:]) == lanes[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_found_anywhere(bad):
    for size, place in ((1, 0), (100_003, 0), (100_003, 65_536), (100_003, 100_002)):
        flat = torch.ones(size)
        assert is_finite(flat)
        flat[place] = bad
        assert not is_finite(flat)
        assert not math.isfinite(squared_norm(flat))
    assert is_finite(torch.empty(0))
    assert math.isfinite(squared_norm(torch.full((1000,), 3.4e38)))


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": 0.0},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"epsilon": math.nan},
        {"weight_decay": "1"},
        {"momentum": 0.9},
    ],
)
def test_wrong_settings_name_the_field(values):
    with pytest.raises(
        LocalError, match=f"HP-CFG-010: the optimizer's {next(iter(values))}.* cannot be used"
    ):
        AdamWSettings.from_mapping(SETTINGS.model_dump() | values)
