"""When a relayed peer is tried directly again."""

from itertools import accumulate

from hetpeer.dht.reach.connection_monitor import KNOCK_S, SHORTEN_S


def test_a_pair_that_was_too_busy_is_direct_within_a_minute_of_that() -> None:
    """However long it was busy: the next attempt comes soon, and gives a slow machine time to answer."""
    tries = [*accumulate(SHORTEN_S), *(sum(SHORTEN_S) + SHORTEN_S[-1] * n for n in range(1, 40))]
    for busy_until in range(0, 900, 7):
        count, at = next((count, at) for count, at in enumerate(tries) if at >= busy_until)
        assert at + KNOCK_S[min(count, len(KNOCK_S) - 1)] <= busy_until + 60
    assert list(KNOCK_S) == sorted(KNOCK_S)
