"""A link over socket pairs: credit is shared by its lanes, who falls behind is said, and the wrong side is
an offence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import ChannelServer
from hetpeer.dht.streams.abuse import Offence, kind_of
from hetpeer.dht.streams.flow_control import GrantBudget, HeldBytes, LinkGrants
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.transport.link import Link, LinkTraffic
from hetpeer.peer.transport.uplink import ACTIVATIONS, CONGESTED_BYTES, Pressure
from tests.dht.loopback import Loopback
from tests.dht.test_channel import until

SIZE = 1000


class Owner:
    """What a link says."""

    def __init__(self) -> None:
        self.pressed: list[int | None] = []
        self.offences: list[Offence] = []

    def link_changed(self, _peer: str, is_up: bool) -> None: ...

    def link_lost(self, link: Link) -> None: ...

    def link_moved(self, link: Link, traffic: LinkTraffic) -> None: ...

    def link_congested(self, _peer: str, blocks: int | None) -> None:
        self.pressed.append(blocks)

    def offended(self, _peer: str, error: ProtocolError) -> None:
        self.offences.append(kind_of(error))


class Taker:
    """A receiver with room for two frames of a pool, in all lanes; `backs` let them go."""

    def __init__(self) -> None:
        self.server = ChannelServer(lambda _peer, _key: self, 1 << 20)
        budget = GrantBudget(SIZE, 2 * SIZE)
        self.holding = HeldBytes()
        self.grants = LinkGrants((budget,) * 3, 5, self.holding, self.announce)
        self.backs: list[Any] = []
        self.came: list[int] = []
        self.most = 0

    def announce(self) -> None:
        for channel in self.server:
            channel.announce()

    async def frame(self, channel: Channel, header: Mapping[str, Any], payload: Stream, length: int) -> None:
        assert channel.grant_lane is not None
        channel.grant_lane.claim(header["pool"], length)
        await payload.receive_bytes(SIZE)
        self.came.append(header["i"])
        self.backs.append(channel.grant_lane.settle(header["pool"], length))
        self.most = max(self.most, self.holding.held.total())

    async def beat(self, channel: Channel) -> None: ...

    def up(self, channel: Channel) -> None:
        channel.grant_lane = channel.grant_lane or self.grants.lane()

    def down(self, channel: Channel) -> None: ...


def parcel(i: int, pool: int) -> Parcel:
    return Parcel({"i": i, "pool": pool}, (bytes(SIZE),), tag=i // 10, pool=pool, cost=SIZE)


@asynccontextmanager
async def linked(taker: Taker) -> AsyncIterator[tuple[Link, Owner]]:
    owner, tasks = Owner(), TaskSet()
    link = Link(Loopback(taker.server.handle), "them", "a", tasks, owner)  # type: ignore[arg-type]
    try:
        yield link, owner
    finally:
        link.close()
        taker.server.close()
        await tasks.close()


async def test_lanes_share_the_credit_and_say_when_it_is_not_enough() -> None:
    taker = Taker()
    async with linked(taker) as (link, owner):
        for i in range(10):
            link.send(parcel(i, ACTIVATIONS + 1))
        link.send(parcel(10, 0))
        await until(lambda: len(taker.came) == 3)  # two of ten, and the gradient behind them
        assert 10 in taker.came
        assert owner.pressed[-1] == 2  # forwards with two blocks or more left there are to wait
        while len(taker.came) < 11:
            await until(lambda: bool(taker.backs))
            taker.backs.pop()()
        await until(lambda: owner.pressed[-1] is None)
        assert taker.most <= 3 * SIZE
        assert sorted(taker.came) == list(range(11))
        assert not owner.offences


async def test_what_waits_is_forgotten_with_its_step_and_the_link_is_free() -> None:
    taker = Taker()
    async with linked(taker) as (link, owner):
        for i in range(10):
            link.send(parcel(i, ACTIVATIONS))
        await until(lambda: len(taker.came) == 2 and owner.pressed[-1] == 1)
        link.forget(0)
        assert owner.pressed[-1] == 1  # whoever ends a step has more to do first
        await until(lambda: owner.pressed[-1] is None)
        for back in taker.backs:
            back()
        link.send(parcel(20, ACTIVATIONS))
        await until(lambda: taker.came[-1] == 20)


async def test_what_is_not_in_memory_is_loaded_when_its_turn_has_come() -> None:
    """And tried again, in its place, as long as there is no room for it; its credit is not spent twice."""
    taker, room, loaded, arrived = Taker(), [False], list[int](), list[int]()

    def late(i: int) -> Parcel:
        blank = replace(parcel(i, ACTIVATIONS), payload=())

        def depart() -> Parcel | None:
            if not room[0]:
                return None
            loaded.append(i)
            return replace(blank, payload=(bytes(SIZE),), done=lambda: arrived.append(i))

        return replace(blank, depart=depart)

    async with linked(taker) as (link, _):
        for i in range(6):
            link.send(late(i))
        await until(lambda: link.is_up)
        assert taker.came == []
        room[0] = True
        link.send(parcel(10, 0))  # whatever moves the link
        await until(lambda: 10 in taker.came and len(taker.came) == 3)
        assert loaded == [0, 1]  # there is credit for two
        while len(taker.came) < 7:
            await until(lambda: bool(taker.backs))
            taker.backs.pop()()
        await until(lambda: sorted(arrived) == list(range(6)))
        assert sorted(taker.came) == [*range(6), 10]


async def test_a_tensor_on_the_wrong_side_is_an_offence() -> None:
    taker = Taker()
    async with linked(taker) as (link, owner):
        await until(lambda: link.is_up)
        back = taker.server.channels.get(("us", 0))
        assert back is not None
        back.send(Parcel({"i": 0}, ()))
        await until(lambda: bool(owner.offences))
        assert owner.offences[0] is Offence.WRONG_SIDE


def test_pressure() -> None:
    pressure = Pressure()
    assert not pressure.judge([], 2, 1 << 30, 1.0)  # one or two long frames on a slow line are none
    assert pressure.judge([], 3, 2100, 1000.0)
    assert pressure.held == 0
    assert not pressure.judge([], 3, 1500, 1000.0)
    assert pressure.judge([], 3, 900, 1000.0)
    assert pressure.held is None
    assert pressure.judge([], 50, CONGESTED_BYTES + 1, 0.0)
    assert pressure.judge([0, 1, ACTIVATIONS + 3, ACTIVATIONS + 5], 0, 0, 0.0)
    assert pressure.held == 4
    assert not pressure.judge([1, ACTIVATIONS + 3], 0, 0, 0.0)
    assert pressure.judge([0, 1], 0, 0, 0.0)  # gradients and shards hold no forwards back
    assert pressure.held is None
