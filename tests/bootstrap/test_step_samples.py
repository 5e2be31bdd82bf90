"""The microbatches of a step: which there are, and what each counts."""

import pytest

from hetpeer.bootstrap.coordinator.step_samples import StepSamples
from hetpeer.bootstrap.state.effects import CoordinatorConfig, NextStep
from tests.bootstrap.court import CONFIG

TRAINS, EVALUATES, BOTH = (True, False), (False, True), (True, True)


def samples(kind=BOTH, **changes):
    config = CoordinatorConfig(**(CONFIG | {"sizes": (8, 4), "evaluation_microbatches": 2} | changes))
    return StepSamples(config, NextStep(6, *kind))


@pytest.mark.parametrize(
    ("kind", "training", "evaluation"),
    [(TRAINS, [0, 1], []), (EVALUATES, [], [2, 3]), (BOTH, [0, 1], [2, 3])],
)
def test_ids_are_the_same_in_every_step(kind, training, evaluation):
    one = samples(kind)
    assert ([*one.training], [*one.evaluation]) == (training, evaluation)


def test_a_microbatch_weighs_its_samples_unless_the_run_says_so():
    plain, weighted = samples(), samples(weights=lambda batch: (batch, 0))
    assert (plain.weights, plain.told) == ({0: 8, 1: 4}, ())
    assert (weighted.weights, weighted.told) == ({0: 6, 1: 0}, (6, 0))
    assert weighted.sizes == {0: 8, 1: 4}
    assert plain.evaluation_weights == {2: 1, 3: 1}
    assert samples(evaluation_weights=(5, 6)).evaluation_weights == {2: 5, 3: 6}


def test_a_bad_sample_is_left_out_in_its_batch_and_a_held_out_one_in_all():
    bad = {(6, 0), (5, 1), (None, 3)}
    assert samples(skips=True).left_out(bad) == [0, 3]
    assert samples(skips=False).left_out(bad) == []
    assert samples(weights=lambda _: (1, 0)).left_out(bad) == [1]


@pytest.mark.parametrize(
    ("kind", "left", "what"),
    [
        (TRAINS, ((0,), ()), None),
        (TRAINS, ((), ()), "microbatch"),
        (BOTH, ((0,), ()), "held-out microbatch"),
        (EVALUATES, ((), (2,)), None),
    ],
)
def test_what_there_is_none_left_of(kind, left, what):
    assert samples(kind).lack(*left) == what
