"""Strangers that take all streams there are for strangers: others get in, from other networks, and in the place of who is of no use."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import pytest

from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.p2pd.listener import Listener, StreamBudget
from hetpeer.dht.streams.abuse import SEAT_IDLE_S, SEAT_LONG_S, STRANGER, gives_way, has_share
from hetpeer.dht.streams.stream import Stream
from tests.dht.loopback import Loopback
from tests.dht.test_channel import until

FEW = StreamBudget("few", per_peer=8, strangers=4, pace=STRANGER)
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


async def test_a_volunteer_of_the_step_comes_in_whoever_is_there(house: House) -> None:
    comers = [await house.comes(f"sybil {number}", "") for number in range(4)]
    await until(lambda: len(house.inside) == 4)
    house.listener.members = frozenset({"honest"})
    comers.append(await house.comes("honest", ""))
    await until(lambda: len(house.inside) == 5)
    for _, beating in comers:
        beating.cancel()
