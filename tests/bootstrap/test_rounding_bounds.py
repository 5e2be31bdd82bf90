"""Bounds where processors differ: what two computations of a segment differ in, and not what they share by
accident.
"""

import math

import numpy as np
import pytest

from hetpeer.bootstrap.audit.replay_script import BlockSum, ReplayStep, Segment
from hetpeer.bootstrap.audit.rounding import compare_numbers

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
    assert compare_numbers(run, [computed()], [other]).difference is None
    found = compare_numbers(run, [computed()], [computed()]).difference
    assert found is not None
    assert found.what == "norm"


def test_losses_that_are_equal_by_accident_make_no_narrow_bound() -> None:
    run = of_the_run(loss=1 + 2e-6)
    assert compare_numbers(run, [computed()], [computed(losses=(0.5 + 1e-6, 1.5 - 1e-6))]).difference is None
    found = compare_numbers(run, [computed()], [computed()]).difference
    assert found is not None
    assert (found.what, found.blocks) == ("loss", ())


def test_the_block_and_those_who_computed_it_are_named() -> None:
    run = of_the_run(norms=(3.0 * (1 + 2e-6), 4.0 * (1 + 5e-5)))
    found = compare_numbers(run, [computed()], [computed()]).difference
    assert str(found).startswith(
        "step 7: the norm of block 1 is not what one machine gets (computed by both, second): 5.0e-05 off"
    )
