"""What holds a volunteer back, in given time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.peer.limits.holds import Holds, Reason


def test_nothing_holds_at_first() -> None:
    assert Holds().at(0.0) == ()
    assert Holds().until(5.0) == 5.0


def test_reasons_come_in_their_order() -> None:
    holds = Holds()
    for reason in (Reason.GAME, Reason.USER, Reason.BATTERY):
        holds.hold(reason)
    assert holds.at(0.0) == (Reason.USER, Reason.BATTERY, Reason.GAME)
    holds.release(Reason.USER)
    holds.release(Reason.SCHEDULE)  # which does not hold
    assert holds.at(1e9) == (Reason.BATTERY, Reason.GAME)
    assert holds.until(0.0) == math.inf


def test_a_time_ends() -> None:
    holds = Holds()
    holds.hold(Reason.USER, until=10.0)
    assert (holds.at(9.9), holds.until(9.9)) == ((Reason.USER,), 10.0)
    assert (holds.at(10.0), holds.until(10.0)) == ((), 10.0)


@pytest.mark.parametrize(("second", "ends"), [(5.0, 5.0), (20.0, 20.0), (math.inf, math.inf)])
def test_the_second_word_counts(second: float, ends: float) -> None:
    holds = Holds()
    holds.hold(Reason.USER, until=10.0)
    holds.hold(Reason.USER, until=second)
    assert holds.until(0.0) == ends


Words = st.tuples(st.sampled_from(Reason), st.none() | st.floats(0, 100), st.floats(0, 5))


@given(st.lists(Words))
def test_it_works_exactly_when_every_reason_is_over(words: list[tuple[Reason, float | None, float]]) -> None:
    """Against a list that is read from the beginning each time. None releases."""
    holds, said, now = Holds(), {}, 0.0
    for reason, until, after in words:
        now += after
        if until is None:
            holds.release(reason)
        else:
            holds.hold(reason, until)
        said[reason] = -math.inf if until is None else until
        held = [reason for reason in Reason if said.get(reason, -math.inf) > now]
        assert list(holds.at(now)) == held
        assert holds.until(now) == max([said[reason] for reason in held], default=now)
        assert not holds.at(holds.until(now))
