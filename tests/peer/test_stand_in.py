"""When a reliable peer works itself, and when it stops."""

from hetpeer.peer.reliable.stand_in import AGAIN_S, ENOUGH_S, NEEDED_S, Need, StandInOrder


def test_it_comes_when_nobody_else_does_and_goes_when_others_are_back() -> None:
    need = Need()
    assert need.order(wanted=True, works=False, now=0.0) is None
    assert need.order(wanted=False, works=False, now=NEEDED_S - 1) is None  # somebody came
    assert need.order(wanted=True, works=False, now=NEEDED_S) is None
    assert need.order(wanted=True, works=False, now=2 * NEEDED_S) is StandInOrder.START
    assert need.order(wanted=True, works=True, now=1000.0) is None
    assert need.order(wanted=False, works=True, now=1001.0) is None
    assert need.order(wanted=True, works=True, now=1001.0 + ENOUGH_S) is None  # they have gone again
    assert need.order(wanted=False, works=True, now=2000.0) is None
    assert need.order(wanted=False, works=True, now=2000.0 + ENOUGH_S) is StandInOrder.END


def test_it_does_not_fail_over_and_over() -> None:
    need = Need()
    need.failed(now=100.0)
    assert need.order(wanted=True, works=False, now=100.0) is None
    assert need.order(wanted=True, works=False, now=99.0 + AGAIN_S) is None
    assert need.order(wanted=True, works=False, now=100.0 + AGAIN_S) is StandInOrder.START
