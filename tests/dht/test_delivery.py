"""Slow lines are told from those who only pretend: by arithmetic here, by real streams in test_limits.py."""

import random

import pytest

from hetpeer.dht.streams.abuse import (
    DRIP_BYTES,
    FRAME_S,
    MEMBER,
    STRANGER,
    WINDOW_S,
    Delivery,
    DeliveryState,
    FrameWatch,
    PeerTraffic,
)


def verdict(deliver, length=4 << 20, pace=MEMBER, lasts_s=600):
    """What is said of a frame on which `deliver(second, delivery)` calls what comes, and after how many seconds."""
    delivery = Delivery(PeerTraffic())
    watch = FrameWatch(delivery, length, 0.0, pace)
    for second in range(1, lasts_s):
        deliver(second, delivery)
        if delivery.nbytes >= length:
            return DeliveryState.FINE, second
        if (said := watch.judge(float(second))) is not DeliveryState.FINE:
            return said, second
    return DeliveryState.FINE, lasts_s


@pytest.mark.parametrize(
    ("rate", "piece"),
    [(2_000, 1_400), (20_000, 1_400), (20_000, 32 << 10), (20_000, 64 << 10), (2_000_000, 64 << 10)],
)
def test_a_home_line_is_never_cut(rate, piece):
    """Bytes come in pieces, as fast as the line is; three other streams have their turns too."""
    chance = random.Random(rate + piece)
    owed = [0.0]

    def deliver(_second, delivery):
        owed[0] += rate
        while owed[0] >= piece:
            owed[0] -= piece
            if chance.random() < 0.25:
                delivery.came(piece)
            else:
                delivery.peer.nbytes += piece

    assert verdict(deliver)[0] is DeliveryState.FINE


@pytest.mark.parametrize("pace", [MEMBER, STRANGER])
@pytest.mark.parametrize("drop", [1, 40])
def test_drops_are_found_within_ten_seconds(pace, drop):
    said, second = verdict(lambda _s, delivery: delivery.came(drop), pace=pace)
    assert said is DeliveryState.DRIPS
    assert second <= 10


def test_drops_are_found_beside_a_stream_that_runs():
    def deliver(_second, delivery):
        delivery.came(1)
        delivery.peer.nbytes += 1_000_000

    said, second = verdict(deliver)
    assert said is DeliveryState.DRIPS
    assert second <= 10


def test_a_line_that_is_gone_is_slow_but_does_not_drip():
    said, second = verdict(lambda second, delivery: delivery.came(20_000) if second < 3 else None)
    assert said is DeliveryState.SLOW
    assert second <= 3 + WINDOW_S + 1


def test_strangers_have_less_time():
    trickle = (DRIP_BYTES // 2, 4_000)
    assert verdict(lambda _s, d: d.came(trickle[1]), pace=STRANGER) == (DeliveryState.SLOW, 5)
    assert verdict(lambda _s, d: d.came(trickle[1]), pace=MEMBER)[0] is DeliveryState.FINE


def test_a_frame_has_to_end():
    """Other streams of the peer run; this one gets a little, for ever."""

    def deliver(second, delivery):
        delivery.peer.nbytes += 100_000
        if second % 30 == 0:
            delivery.came(2_000)

    said, second = verdict(deliver, length=200_000)
    assert said is DeliveryState.LATE
    assert second <= FRAME_S + 200 + 1
