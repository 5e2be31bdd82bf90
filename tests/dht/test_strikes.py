"""Strikes add up, fade, and cost longer and longer; whoever does nothing wrong is never refused."""

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.streams.abuse import (
    FADE_S,
    FIRST_REFUSAL_S,
    LONGEST_REFUSAL_S,
    MAX_PEERS,
    REFUSAL_STRIKES,
    Offence,
    OffenceError,
    Strikes,
    kind_of,
)


def refusal(strikes, now, peer="bad"):
    """Strike until the peer is refused; for how long."""
    for _ in range(20):
        if seconds := strikes.strike(peer, Offence.LENGTH, now):
            return seconds
    raise AssertionError("never refused")


def test_a_few_are_forgiven_many_are_not():
    strikes = Strikes()
    for _ in range(int(REFUSAL_STRIKES)):
        assert not strikes.strike("bad", Offence.DRIP, 0.0)
        assert not strikes.refuses("bad", 0.0)
    assert strikes.strike("bad", Offence.FLOOD, 0.0) == FIRST_REFUSAL_S
    assert strikes.refuses("bad", FIRST_REFUSAL_S - 1)
    assert not strikes.refuses("bad", FIRST_REFUSAL_S)
    assert not strikes.refuses("good", 0.0)
    assert strikes.counts() == {"bad": {"drip": int(REFUSAL_STRIKES), "flood": 1}}


def test_old_ones_fade():
    strikes = Strikes()
    for n in range(100):
        assert not strikes.strike("unlucky", Offence.MALFORMED, n * FADE_S)


def test_each_refusal_is_longer_than_the_one_before_up_to_a_bound():
    strikes, now, seconds = Strikes(), 0.0, []
    for _ in range(10):
        seconds.append(refusal(strikes, now))
        assert strikes.strike("bad", Offence.LENGTH, now) == 0.0  # it is refused already
        now += seconds[-1]
    assert seconds[:4] == [FIRST_REFUSAL_S * 2**n for n in range(4)]
    assert seconds[-1] == LONGEST_REFUSAL_S
    assert refusal(strikes, now + 1e6) == FIRST_REFUSAL_S


@given(st.lists(st.integers(0, 3000), max_size=3000))
def test_the_ledger_is_bounded_and_keeps_who_is_refused(names):
    strikes = Strikes()
    refusal(strikes, 0.0, "worst")
    for name in names:
        strikes.strike(str(name), Offence.LENGTH, 1.0)
    assert len(strikes.counts()) <= MAX_PEERS
    assert strikes.refuses("worst", 1.0)


def test_the_kind_of_an_error():
    assert kind_of(ProtocolError("?")) is Offence.MALFORMED
    assert kind_of(OffenceError(Offence.CODEC, "?")) is Offence.CODEC
