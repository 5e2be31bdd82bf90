"""Bounds where processors differ: what two computations of a segment differ in, and not what they share by
accident.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from hetpeer.bootstrap.audit.replay_script import BlockSum, ReplayStep, Segment
from hetpeer.bootstrap.audit.rounding import NOISE_ROOM, Computation, compare_numbers

SKETCH = np.ones(64)


def computed(loss=1.0, norms=(3.0, 4.0), losses=(0.5, 1.5), sketches=(SKETCH, SKETCH)):
    return {
        "step": 7,
        "loss": loss,
        "norm": math.hypot(*norms),
        "squares": [norm * norm for norm in norms],
        "losses": list(losses),
        "sketches": [one.astype("<f4").tobytes().hex() for one in sketches],
    }


def once(result=None, **room):
    """A computation of the step alone."""
    return Computation([result or computed()], Path("none"), **room)


def of_the_run(loss=1.0, norms=(3.0, 4.0), *, tells_blocks=True):
    sums = [
        BlockSum(order=((peer, ((0, 1),)), ("both", ((2,),))), ordered=True, gradient="", state="")
        for peer in ("first", "second")
    ]
    step = ReplayStep(
        step=7,
        batch=7,
        behind=0,
        workers=1,
        loss=loss,
        norm=math.hypot(*norms),
        squares=[norm * norm for norm in norms] if tells_blocks else (),
        coefficient=1.0,
        blocks=sums,
        arithmetics=frozenset(("one", "other")),
    )
    return Segment(base={"version": 7}, steps=[step], evaluations={}, unevaluated={}, end=None)


@pytest.mark.parametrize("tells_blocks", [False, True])
def test_norms_that_are_equal_by_accident_make_no_narrow_bound(tells_blocks: bool) -> None:
    """Two gradients 4e-6 apart had norms 6e-8 apart: an honest run, 1.2e-6 off, was called false."""
    apart = SKETCH * 1e-6
    run = of_the_run(norms=(3.0 * (1 + 1.2e-6), 4.0 * (1 + 1.2e-6)), tells_blocks=tells_blocks)
    other = computed(sketches=(SKETCH + apart, SKETCH - apart))
    assert compare_numbers(run, once(), [once(other)]).difference is None
    found = compare_numbers(run, once(), [once()]).difference
    assert found is not None
    assert found.what == "norm"


def test_losses_that_are_equal_by_accident_make_no_narrow_bound() -> None:
    run, other = of_the_run(loss=1 + 2e-6), computed(losses=(0.5 + 1e-6, 1.5 - 1e-6))
    assert compare_numbers(run, once(), [once(other)]).difference is None
    found = compare_numbers(run, once(), [once()]).difference
    assert found is not None
    assert (found.what, found.blocks) == ("loss", ())


def test_the_block_and_those_who_computed_it_are_named() -> None:
    run = of_the_run(norms=(3.0 * (1 + 2e-6), 4.0 * (1 + 5e-5)))
    found = compare_numbers(run, once(), [once()]).difference
    assert str(found).startswith(
        "step 7: the norm of block 1 is not what one machine gets (computed by both, second): 5.0e-05 off"
    )


def test_a_segment_that_seems_wrong_may_be_as_far_away_as_noise_carries_it() -> None:
    """Honest runs at a high learning rate were up to 45 times as far away as two computations apart."""
    run, near = of_the_run(loss=1 + 1e-3), once(computed(losses=(0.5 + 1e-6, 1.5)))
    assert compare_numbers(run, once(), [near]).difference is not None
    noisy = [once(computed(losses=(0.5 + apart, 1.5)), room=NOISE_ROOM) for apart in (1e-4, 6e-4)]
    assert compare_numbers(run, once(), [near, *noisy]).difference is None
    (different,) = [compare_numbers(of_the_run(loss=1 + 3e-3), once(), [near, *noisy]).difference]
    assert different is not None
    assert different.bound == pytest.approx(NOISE_ROOM * 3e-4)
