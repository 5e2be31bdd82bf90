"""Slow and dripping peers, strikes, and streams of strangers: by arithmetic here, by real streams in
test_limits.py.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import PeerLostError, ProtocolError
from hetpeer.dht.p2pd.listener import Listener, StreamBudget
from hetpeer.dht.streams.abuse import (
    DRIP_BYTES,
    FADE_S,
    FIRST_REFUSAL_S,
    FRAME_S,
    LONGEST_REFUSAL_S,
    MAX_PEERS,
    MEMBER,
    REFUSAL_STRIKES,
    SEAT_IDLE_S,
    SEAT_LONG_S,
    STRANGER,
    WINDOW_S,
    Delivery,
    DeliveryState,
    FrameWatch,
    Offence,
    OffenceError,
    PeerTraffic,
    Strikes,
    gives_way,
    has_share,
    kind_of,
)
from hetpeer.dht.streams.stream import Stream
from tests.dht.loopback import Loopback
from tests.dht.test_channel import until


def verdict(deliver, length=4 << 20, pace=MEMBER, lasts_s=600):
    """What is said of a frame on which `deliver(second, delivery)` calls what comes, and after how many
    seconds.
    """
    delivery = Delivery(PeerTraffic())
    watch = FrameWatch(delivery, length, (0.0, delivery.nbytes, delivery.peer.nbytes), pace)
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


FEW = StreamBudget(per_peer=8, strangers=4, pace=STRANGER)
FAR, FARTHER = "/ip4/8.8.8.{}/tcp/1", "/ip4/9.9.9.{}/tcp/1"


@dataclass
class Sits:
    used_at: float
    busy: bool = False
    network: str = ""


def test_a_network_gets_a_quarter_and_those_of_one_house_are_one_house() -> None:
    taken = [Sits(0.0, network="8.8.8.0/24") for _ in range(16)]
    assert not has_share("8.8.8.0/24", taken, 64)
    assert has_share("8.8.8.0/24", taken[1:], 64)
    assert has_share("9.9.9.0/24", taken, 64)
    assert has_share("", [Sits(0.0)] * 60, 64)


@pytest.mark.parametrize(
    ("taken", "goes"),
    [
        ([], None),
        ([Sits(100.0), Sits(110.0 - SEAT_IDLE_S)], None),
        ([Sits(109.0 - SEAT_IDLE_S), Sits(108.0 - SEAT_IDLE_S)], 1),
        ([Sits(111.0 - SEAT_LONG_S, busy=True)], None),
        ([Sits(109.0 - SEAT_LONG_S, busy=True)], 0),
        ([Sits(109.0 - SEAT_LONG_S, busy=True), Sits(100.0 - SEAT_IDLE_S)], 1),
    ],
    ids=["nobody", "of use", "the one idle for longest", "under way", "under way for long", "idle first"],
)
def test_who_gives_way(taken: list[Sits], goes: int | None) -> None:
    assert gives_way(taken, 110.0) is (None if goes is None else taken[goes])


class House:
    """A listener with room for four streams of strangers, whose handler beats as an idle channel does."""

    def __init__(self) -> None:
        self.listener = Listener()
        self.listener.serve("test", self._beat, FEW)
        self.inside: list[str] = []

    async def _beat(self, stream: Stream) -> None:
        self.inside.append(stream.peer_id)
        try:
            while True:
                await stream.receive()
        finally:
            self.inside.remove(stream.peer_id)

    async def comes(self, peer: str, address: str) -> tuple[Stream, asyncio.Task[None]]:
        """A stream of `peer`, whom libp2p has introduced."""

        async def carried(stream: Stream) -> None:
            await self.listener.carry(stream._wire, peer, address, "test")

        near = await Loopback(carried, peer).open("us", "test", timeout_s=5.0)
        return near, asyncio.create_task(beats(near))


async def beats(stream: Stream) -> None:
    with suppress(PeerLostError):
        while True:
            await stream.send({"a": 0})
            await asyncio.sleep(0.01)


@pytest.fixture
def house() -> House:
    return House()


async def test_one_network_does_not_take_all(house: House) -> None:
    comers = [await house.comes(f"sybil {number}", FAR.format(number)) for number in range(4)]
    await until(lambda: len(house.inside) == 1)
    comers.append(await house.comes("honest", FARTHER.format(1)))
    await until(lambda: "honest" in house.inside)
    assert len(house.inside) == 2
    for _, beating in comers:
        beating.cancel()


async def test_streams_that_only_beat_keep_nobody_out_for_long(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    comers = [await house.comes(f"sybil {number}", "") for number in range(4)]
    await until(lambda: len(house.inside) == 4)
    refused = await house.comes("honest", "")
    await asyncio.wait_for(refused[1], 60)
    assert "honest" not in house.inside
    monkeypatch.setattr("hetpeer.dht.streams.abuse.SEAT_IDLE_S", 0.0)
    comers.append(await house.comes("honest", ""))
    await until(lambda: "honest" in house.inside)
    await until(lambda: len(house.inside) == 4)
    for _, beating in comers:
        beating.cancel()


@pytest.mark.parametrize("reliable", [False, True])
async def test_a_volunteer_of_the_step_and_a_reliable_peer_come_in_whoever_is_there(
    house: House, *, reliable: bool
) -> None:
    comers = [await house.comes(f"sybil {number}", "") for number in range(4)]
    await until(lambda: len(house.inside) == 4)
    if reliable:
        house.listener.reliable = lambda: ["honest"]
    else:
        house.listener.members = frozenset({"honest"})
    comers.append(await house.comes("honest", ""))
    await until(lambda: len(house.inside) == 5)
    for _, beating in comers:
        beating.cancel()
