"""Effects are carried out in the order in which the core gave them, also those of a call that an effect
has caused.
"""

import doctest

import pytest

from hetpeer.averaging import effect_queue
from hetpeer.averaging.effect_queue import EffectQueue


def test_the_example_of_the_docstring():
    assert doctest.testmod(effect_queue).failed == 0


def test_what_an_effect_causes_waits_behind_the_effects_before_it():
    done, drained = [], []

    def carry_out(effect):
        done.append(effect)
        if effect == "to myself":
            queue.perform(["result", "inspect"])
            assert done == ["to myself"]

    queue = EffectQueue(carry_out, lambda: drained.append(len(done)))
    queue.perform(["to myself", "to others"])
    assert done == ["to myself", "to others", "result", "inspect"]
    assert drained == [4]  # once, at the end


def test_an_error_is_raised_from_the_outermost_call_and_drops_what_waits():
    def carry_out(effect):
        if effect == "fails":
            raise ValueError(effect)
        done.append(effect)
        if effect == "first":
            queue.perform(["fails", "never"])

    done, queue = [], EffectQueue(carry_out)
    with pytest.raises(ValueError, match="fails"):
        queue.perform(["first", "second"])
    queue.perform(["third"])
    assert done == ["first", "second", "third"]


def test_nothing_is_carried_out_after_close():
    def carry_out(effect):
        done.append(effect)
        queue.close()

    done, queue = [], EffectQueue(carry_out)
    queue.perform(["first", "second"])
    queue.perform(["third"])
    assert done == ["first"]
