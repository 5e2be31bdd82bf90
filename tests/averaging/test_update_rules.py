"""The update rule: AdamW by the paper, and equal bits wherever it runs."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging.optim import update_rule
from hetpeer.averaging.optim.adam import Momentum
from hetpeer.averaging.optim.learning_rate import PIECES, factor, knots_of
from hetpeer.averaging.optim.update_rules import rule_of
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.block import exact_numerics, exact_scalars
from hetpeer.stages.block.exact_numerics import first_not_finite, is_finite, squared_norm
from tests.amounts import examples

SETTINGS = {"name": "AdamW", "betas": (0.9, 0.95), "eps": 1e-8, "learning_rate": 3e-3, "weight_decay": 0.1}


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
    rule = rule_of(SETTINGS)
    for step, gradient in enumerate(gradients(size, steps), start=1):
        rule.apply(
            parameters=parameters,
            state={"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
            gradient=gradient,
            coefficient=coefficient,
            update=step,
            step=step,
        )
    return [bytes(vector.numpy().data.cast("B")) for vector in (parameters, exp_avg, exp_avg_sq)]


def ieee(size, steps, coefficient):
    """The same chain in numpy, where each operator is one IEEE operation on float32 by construction."""
    f32 = np.float32
    one = SETTINGS
    beta1, beta2 = one["betas"]
    parameters = torch.randn(size, generator=torch.Generator().manual_seed(0)).numpy()
    exp_avg, exp_avg_sq = np.zeros(size, f32), np.zeros(size, f32)
    for step, raw in enumerate(gradients(size, steps), start=1):
        gradient = raw.numpy() * f32(coefficient)
        parameters = parameters * f32(1 - one["learning_rate"] * one["weight_decay"])
        exp_avg = exp_avg + (gradient - exp_avg) * f32(1 - beta1)
        exp_avg_sq = exp_avg_sq * f32(beta2) + gradient * gradient * f32(1 - beta2)
        denominator = np.sqrt(exp_avg_sq) * f32(1 / math.sqrt(1 - beta2**step)) + f32(one["eps"])
        parameters = parameters + exp_avg / denominator * f32(-one["learning_rate"] / (1 - beta1**step))
    return [vector.tobytes() for vector in (parameters, exp_avg, exp_avg_sq)]


@pytest.mark.parametrize("size", [1, 7, 1001, 70_003])
def test_bits_are_those_of_single_ieee_operations(size):
    assert train(size, 4, coefficient=0.37) == ieee(size, 4, 0.37)


def test_bits_do_not_depend_on_threads_chunks_or_alignment(monkeypatch):
    size = 2 * update_rule.CHUNK + 12_345
    with threads(1):
        expected = train(size, 2)
    with threads(2):
        assert train(size, 2) == expected
    assert train(size, 2, offset=3) == expected
    monkeypatch.setattr(update_rule, "CHUNK", 33_331)
    assert train(size, 2) == expected


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.99, 0.999)])
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_follows_torch_adam(name, betas):
    one = SETTINGS | {"name": name, "betas": betas}
    generator = torch.Generator().manual_seed(5)
    size = 5_000
    mine = torch.randn(size, generator=generator)
    theirs = mine.clone().requires_grad_()
    exp_avg, exp_avg_sq = torch.zeros(size), torch.zeros(size)
    optimizer = getattr(torch.optim, name)(
        [theirs],
        lr=one["learning_rate"],
        betas=one["betas"],
        eps=one["eps"],
        weight_decay=one["weight_decay"],
        foreach=False,
        **({"decoupled_weight_decay": True} if name == "NAdam" else {}),
    )
    rule = rule_of(one)
    for step in range(1, 51):
        gradient = torch.randn(size, generator=generator)
        theirs.grad = gradient.clone()
        optimizer.step()
        rule.apply(
            parameters=mine,
            state={"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
            gradient=gradient,
            coefficient=1.0,
            update=step,
            step=step,
        )
        difference = (mine - theirs.detach()).abs().max()
        assert difference <= step * 1e-7 * theirs.detach().abs().max()


def test_the_momentum_is_the_same_however_the_updates_come():
    """A worker that is started anew at update 5000 has what one has that was there from the first."""
    always, anew = Momentum(0.9), Momentum(0.9)
    for update in range(1, 5001):
        last = always.at(update)
    assert last == anew.at(5000)
    mu, following, product = last
    assert mu < following < 0.9
    assert product < 1e-30
    assert always.at(3) == Momentum(0.9).at(3)


SGDS = {"name": "SGD", "momentum": 0.9, "nesterov": False, "learning_rate": 3e-2, "weight_decay": 0.1}


@pytest.mark.parametrize("changes", [{}, {"nesterov": True}, {"momentum": 0.0}, {"weight_decay": 0.0}])
def test_follows_torch_sgd_with_a_schedule(changes):
    one = SGDS | {"schedule": knots_of("cosine", 30, 5, 0.0), **changes}
    generator = torch.Generator().manual_seed(5)
    size = 5_000
    mine = torch.randn(size, generator=generator)
    theirs = mine.clone().requires_grad_()
    moment = torch.zeros(size)
    optimizer = torch.optim.SGD(
        [theirs],
        lr=1.0,
        momentum=one["momentum"],
        nesterov=one["nesterov"],
        weight_decay=one["weight_decay"],
    )
    rule = rule_of(one)
    for step in range(1, 31):
        gradient = torch.randn(size, generator=generator)
        theirs.grad = 0.5 * gradient
        optimizer.param_groups[0]["lr"] = one["learning_rate"] * factor(one["schedule"], step)
        optimizer.step()
        rule.apply(
            parameters=mine,
            state={"momentum_buffer": moment} if one["momentum"] else {},
            gradient=gradient,
            coefficient=0.5,
            update=step,
            step=step,
        )
        difference = (mine - theirs.detach()).abs().max()
        assert difference <= step * 2e-7 * theirs.detach().abs().max()
    assert bool(moment.any()) == bool(one["momentum"])


def test_the_schedule_rises_and_falls_as_it_says():
    knots = knots_of("cosine", 110, 10, 0.1)
    steps = (1, 5, 10, 60, 110, 500)
    assert [factor(knots, step) for step in steps] == pytest.approx([0.1, 0.5, 1, 0.55, 0.1, 0.1])
    linear = knots_of("linear", 110, 10, 0.1)
    assert len(linear) == 3
    assert factor(linear, 60) == pytest.approx(0.55)
    constant = knots_of("constant", 8, 4, 0.0)
    assert [factor(constant, step) for step in range(1, 9)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert knots_of("linear", 1, 0, 0.0) == ((1, 1.0),)
    assert factor(knots_of("linear", 2, 0, 0.0), 2) == 0.0


@given(st.integers(2, 5000), st.integers(0, 100), st.sampled_from(["linear", "cosine", "constant"]))
def test_knots_rise_and_a_cosine_of_straight_pieces_is_one(steps, warmup, shape):
    knots = knots_of(shape, steps, warmup, 0.25)
    assert all(one < other for (one, _), (other, _) in itertools.pairwise(knots))
    assert len(knots) <= PIECES + 2
    if shape == "cosine":
        top = max(warmup, 1)
        for step in range(top, steps + 1, 7):
            exact = (
                0.25 + 0.75 * (1 + math.cos(math.pi * (step - top) / (steps - top))) / 2 if steps > top else 1
            )
            assert abs(factor(knots, step) - exact) < 3e-5


@given(base=st.floats(0, 0.9999), exponent=st.integers(1, 100_000))
def test_power_is_a_power(base, exponent):
    assert exact_scalars.power(base, exponent) == pytest.approx(base**exponent, rel=1e-9, abs=1e-300)


@examples(40)
@given(size=st.integers(0, 5000), lanes=st.sampled_from([1, 2, 64, 4096]), seed=st.integers(0, 2**31))
def test_squared_norm_is_accurate_for_any_width(size, lanes, seed):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_numerics, "LANES", lanes)
        found = squared_norm(flat)
    assert found == pytest.approx(math.fsum(float(x) ** 2 for x in flat), rel=1e-13)


def test_squared_norm_is_the_fixed_tree_for_any_thread_count():
    flat = next(iter(gradients(3 * exact_numerics.LANES + 77, 1)))
    padded = np.zeros(4 * exact_numerics.LANES)
    padded[: len(flat)] = flat.double().numpy()
    lanes = np.zeros(exact_numerics.LANES)
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
    others = [torch.ones(3), torch.empty(0), torch.ones(2, dtype=torch.bfloat16)]
    large = torch.tensor([1e300], dtype=torch.float64)
    found = torch.tensor([0.0, bad], dtype=torch.bfloat16, requires_grad=True)
    assert first_not_finite([*others, large]) is None
    assert first_not_finite([*others, found, large, found]) == 3
    assert first_not_finite([]) is None
    assert math.isfinite(squared_norm(torch.full((1000,), 3.4e38)))


def test_numbers_whose_sum_is_too_large_are_finite():
    huge = torch.full((1000,), 3e38)
    assert is_finite(huge)
    assert first_not_finite([huge, torch.tensor([3e38, math.inf, 3e38]), huge]) == 1
    assert not is_finite(torch.tensor([math.inf, -math.inf])), "their sum is no number"


@given(borders=st.lists(st.integers(0, 3000), max_size=6), lanes=st.sampled_from([1, 64, 1024, 4096]))
def test_a_squared_norm_by_pieces_has_the_same_bits(borders, lanes):
    flat = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_numerics, "LANES", lanes)
        norm = exact_numerics.SquaredNorm(flat.device)
        for begin, end in itertools.pairwise([0, *sorted(borders), len(flat)]):
            norm.add(flat[begin:end])
        assert norm.value() == squared_norm(flat)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"betas": (0.9, 1.0)}, "betas.1"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": math.nan}, "eps"),
        ({"weight_decay": "1"}, "weight_decay"),
        ({"schedule": "cosine"}, "schedule"),
        ({"schedule": ()}, "schedule"),
        ({"momentum": 0.9}, "momentum"),
        ({"name": "SGD"}, "betas"),
        ({"name": "Adam"}, "name"),
    ],
)
def test_wrong_settings_name_the_field(values, named):
    with pytest.raises(LocalError, match=rf"HP-RUN-001: bad value in the run's settings: optimizer\.{named}"):
        rule_of(SETTINGS | values)


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_the_second_moment_of_a_mean_of_gradients_is_that_of_its_formula(name):
    """In float64: s² + share · (v - s²), unbiased; of one worker it is v, bit for bit."""
    size, update, workers = 1000, 60, 4
    one, (beta1, beta2) = rule_of(SETTINGS | {"name": name}), SETTINGS["betas"]
    start = {
        vector: torch.rand(size, generator=torch.Generator().manual_seed(n))
        for n, vector in enumerate("pmvsg")
    }
    start["v"] += start["s"] ** 2

    def updated(*vectors, **options):
        parameters, m, v, s = (start[vector].clone() for vector in "pmvs")
        state = {"exp_avg": m, "exp_avg_sq": v, "exp_avg_beta2": s}
        for missing in state.keys() - set(vectors):
            del state[missing]
        options |= {"coefficient": 1.0, "update": update, "step": update}
        one.apply(parameters=parameters, state=state, gradient=start["g"], **options)
        return parameters, m, v, s

    usual, m, v, _ = updated("exp_avg", "exp_avg_sq")
    alone, _, _, s = updated("exp_avg", "exp_avg_sq", "exp_avg_beta2", workers=1)
    assert alone.equal(usual)
    together, same_m, same_v, same_s = updated("exp_avg", "exp_avg_sq", "exp_avg_beta2", workers=workers)
    assert all(a.equal(b) for a, b in ((same_m, m), (same_v, v), (same_s, s)))
    assert torch.allclose(s, start["s"] + (1 - beta2) * (start["g"] - start["s"]), rtol=1e-6)
    mean, second = s.double() / (1 - beta2**update), v.double() / (1 - beta2**update)
    weights = [(1 - beta2) * beta2**age / (1 - beta2**update) for age in range(update)]
    own = math.fsum(weight**2 for weight in weights)
    second = mean**2 + (second - mean**2).clamp(min=0) * (1 / workers - own) / (1 - own)
    first = m.double() / (1 - beta1**update)
    if name == "NAdam":
        mu, following, product = Momentum(beta1).at(update)
        first = m.double() * following / (1 - product * following)
        first += start["g"].double() * (1 - mu) / (1 - product)
    rate = SETTINGS["learning_rate"]
    kept = start["p"].double() * (1 - rate * SETTINGS["weight_decay"])
    expected = kept - rate * first / (second.sqrt() + SETTINGS["eps"])
    assert torch.allclose(together.double(), expected, rtol=1e-5, atol=1e-6)
    assert not together.equal(alone)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("workers", [4, 8, 16])
def test_noise_in_a_mean_of_gradients_is_as_large_as_it_should_be(workers, beta2):
    """Gradients are noise of variance 1: the second moment of their mean is 1/N, also beside a mean.

    The longer first moment with β1 would make it 1.16, 1.35 and 1.79 times that.
    """
    size, updates, eps = 40_000, 150, 1e-30
    rule = rule_of(SETTINGS | {"betas": (0.9, beta2), "eps": eps, "weight_decay": 0.0, "learning_rate": 1.0})
    generator, mean = torch.Generator().manual_seed(workers), 0.5
    for true in (0.0, mean):
        state = {name: torch.zeros(size) for name in ("exp_avg", "exp_avg_sq", "exp_avg_beta2")}
        for update in range(1, updates + 1):
            rule.apply(
                parameters=(step := torch.zeros(size)),
                state=state,
                gradient=torch.randn(size, generator=generator) + true,
                coefficient=1.0,
                update=update,
                step=update,
                workers=workers,
            )
        first = state["exp_avg"].double() / (1 - 0.9**updates)
        second = ((first / step.double()) ** 2).mean().item()
        assert second / (true**2 + 1 / workers) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("update", [1, 2, 5, 40])
def test_a_step_by_few_gradients_is_not_much_longer_than_by_the_papers_formula(update):
    """At the beginning mean and square are of few gradients: no denominator is much smaller for that."""
    rule = rule_of(SETTINGS | {"eps": 1e-30, "weight_decay": 0.0, "learning_rate": 1.0})
    state = {name: torch.zeros(10_000) for name in ("exp_avg", "exp_avg_sq", "exp_avg_beta2")}
    generator, workers = torch.Generator().manual_seed(update), 16
    for number in range(1, update + 1):
        gradient, step = torch.randn(10_000, generator=generator), torch.zeros(10_000)
        how = {"coefficient": 1.0, "update": number, "step": number, "workers": workers}
        rule.apply(parameters=step, state=state, gradient=gradient, **how)
    first, second, slow = (state[name].double() for name in ("exp_avg", "exp_avg_sq", "exp_avg_beta2"))
    first, unbiased = first / (1 - 0.9**update), 1 - 0.95**update
    square, second = (slow / unbiased) ** 2, second / unbiased
    papers = first / (square + (second - square).clamp(min=0) / workers).sqrt()
    assert (step.double().abs() <= papers.abs() * math.sqrt(2) * (1 + 1e-5)).all()
