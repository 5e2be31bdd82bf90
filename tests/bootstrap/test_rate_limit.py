"""The per-peer rate limit of a coordinator."""

import pytest

from hetpeer.bootstrap.service.rate_limit import BYTES, MESSAGES, SESSIONS, RateLimit

BEGAN = 100.0


def listened(within_s: float, nbytes: int, *, session: bool) -> int:
    """Messages read within that time from a peer that never pauses."""
    hearing, now, heard = RateLimit(BEGAN), BEGAN, 0
    while True:
        now += hearing.wait(now, session=session) + 1e-9
        if now > BEGAN + within_s:
            return heard
        hearing.heard(nbytes, session=session)
        heard += 1


@pytest.mark.parametrize(
    ("bounds", "nbytes", "session"), [(SESSIONS, 100, True), (MESSAGES, 100, False), (BYTES, 1 << 19, False)]
)
def test_what_never_pauses_is_heard_at_its_rate_after_the_first(
    bounds: tuple[float, float], nbytes: int, session: bool
) -> None:
    rate, at_once = bounds
    unit = nbytes if bounds is BYTES else 1
    for seconds in (0.001, 10.0, 60.0):
        most = (at_once + seconds * rate) / unit
        assert most - 2 <= listened(seconds, nbytes, session=session) <= most + 2


def test_who_says_little_never_waits() -> None:
    """A hundred messages a second of 10 kB, and a session every ten seconds."""
    hearing = RateLimit(BEGAN)
    for tick in range(20_000):
        now, session = BEGAN + tick / 100.0, tick % 1000 == 0
        assert hearing.wait(now, session=session) == 0.0
        hearing.heard(10_000, session=session)


def test_what_is_rested_is_as_new() -> None:
    hearing = RateLimit(BEGAN)
    assert hearing.is_rested(BEGAN)
    hearing.heard(100, session=True)
    assert not hearing.is_rested(BEGAN + 1.0)
    assert hearing.is_rested(BEGAN + 1.0 / SESSIONS[0])
