"""Channels over socket pairs that are cut again and again: each frame once, in order; and peers that
misbehave.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hetpeer.dht.base.errors import PeerLostError, ProtocolError
from hetpeer.dht.channels import redial as redial_module
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import ChannelServer, dial
from hetpeer.dht.channels.redial import REDIAL_S
from hetpeer.dht.streams.stream import Stream
from tests.dht.loopback import Loopback

LIMIT = 1 << 20


class Kept:
    """A receiver that keeps what comes. `refuse` raises for frames that it says are bad."""

    def __init__(self, refuse: Callable[[Mapping[str, Any]], bool] = lambda _: False) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self._refuse = refuse

    async def frame(
        self, _channel: Channel, header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        data = await payload.receive_bytes(LIMIT)
        if self._refuse(header):
            raise ProtocolError("not this one")
        self.frames.append((header["i"], bytes(data)))

    async def beat(self, channel: Channel) -> None: ...

    def up(self, channel: Channel) -> None: ...

    def down(self, channel: Channel) -> None: ...


def parcel(i: int, size: int = 100) -> Parcel:
    return Parcel({"i": i}, (bytes([i % 256]) * size,), tag=i // 10)


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", range(4))
async def test_each_frame_arrives_once_and_in_order_whatever_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    theirs, ours = Kept(), Kept()
    server = ChannelServer(lambda _peer, _key: theirs, LIMIT)
    network = Loopback(server.handle)
    channel = Channel("them", "a", ours, LIMIT)
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    sizes = [chance.choice((0, 10, 50_000, 400_000)) for _ in range(60)]
    for i, size in enumerate(sizes):
        channel.send(parcel(i, size))
        if (back := server.channels.get(("us", 0))) is not None and i % 3 == 0:
            back.send(parcel(i))
        if chance.random() < 0.15:
            await asyncio.sleep(chance.random() * 0.02)
            network.cut()
    await until(lambda: len(theirs.frames) == 60)
    await asyncio.wait_for(channel.drained(), 30)
    assert theirs.frames == [(i, bytes([i % 256]) * size) for i, size in enumerate(sizes)]
    back = server.channels.get(("us", 0))
    assert back is not None
    await asyncio.wait_for(back.drained(), 30)
    numbers = [i for i, _ in ours.frames]
    assert numbers == sorted(set(numbers))
    assert len(channel.outbox) == len(back.outbox) == 0
    channel.close()
    await asyncio.wait_for(dialling, 30)
    server.close()


@pytest.mark.parametrize("later", range(12))
async def test_who_is_cancelled_while_a_stream_ends_ends_too(later: int) -> None:
    """So many turns of the loop after it was cut: its tasks are ending by then."""
    server = ChannelServer(lambda _peer, _key: Kept(), LIMIT)
    network = Loopback(server.handle)
    channel = Channel("them", "a", Kept(), LIMIT)
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    await until(lambda: channel.is_up)
    network.cut()
    for _ in range(later):
        await asyncio.sleep(0)
    dialling.cancel()
    ended, _ = await asyncio.wait([dialling], timeout=5.0)
    assert ended
    assert dialling.cancelled()
    server.close()


async def test_a_peer_that_lost_its_memory_is_told_from_one_that_was_away() -> None:
    network = Loopback(ChannelServer(lambda _peer, _key: Kept(), LIMIT).handle)
    channel = Channel("them", "a", Kept(), LIMIT)
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    await until(lambda: channel.is_up)
    network.handle = ChannelServer(lambda _peer, _key: Kept(), LIMIT).handle
    network.cut()
    with pytest.raises(PeerLostError, match="does not know this channel"):
        await asyncio.wait_for(dialling, 30)


async def test_a_peer_that_hangs_up_at_once_is_not_dialled_in_a_hot_loop() -> None:
    opened: list[float] = []

    class Noted(Loopback):
        async def open(self, peer: str, protocol: str, *, timeout_s: float) -> Stream:
            opened.append(asyncio.get_running_loop().time())
            return await super().open(peer, protocol, timeout_s=timeout_s)

    async def hang_up(stream: Stream) -> None:
        await stream.receive()
        await stream.send({"has": 0})

    channel = Channel("them", "a", Kept(), LIMIT)
    channel.send(parcel(0))
    dialling = asyncio.create_task(dial(Noted(hang_up), "test", channel))  # type: ignore[arg-type]
    await until(lambda: len(opened) == 4)
    channel.close()
    await asyncio.wait_for(dialling, 30)
    for (before, after), pause_s in zip(itertools.pairwise(opened), REDIAL_S[1:], strict=False):
        assert after - before >= 0.99 * pause_s


async def test_a_link_that_carried_something_is_dialled_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where only acknowledgements come back, however often it was cut before."""
    monkeypatch.setattr(redial_module, "REDIAL_S", (REDIAL_S[0], 600.0))
    theirs = Kept()
    network = Loopback(ChannelServer(lambda _peer, _key: theirs, LIMIT).handle)
    channel = Channel("them", "a", Kept(), LIMIT)
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        for i in range(12):
            channel.send(parcel(i))
            await channel.drained()
            network.cut()
            await until(lambda: channel.is_up)
    channel.close()
    await asyncio.wait_for(dialling, 30)


async def test_buffers_are_free_once_nobody_needs_them_and_they_are_not_being_sent() -> None:
    """Whatever becomes of the stream: it takes no more in the middle of the first frame, and is cut then."""
    free: list[str] = []

    async def stuck(stream: Stream) -> None:
        await stream.receive()
        await stream.send({"has": 0})
        await asyncio.sleep(600)

    def frame(name: str, tag: int) -> Parcel:
        return Parcel({"i": 0}, (bytes(4 << 20),), tag=tag, done=lambda: free.append(name))

    network = Loopback(stuck)
    channel = Channel("them", "a", Kept(), LIMIT)
    for name, tag in (("half sent", 0), ("behind it", 0), ("of another step", 1)):
        channel.send(frame(name, tag))
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    await until(lambda: channel.is_up and network.ends[0]._wire._write_blocked)
    channel.outbox.forget(0)
    assert free == ["behind it"]
    network.cut()
    await until(lambda: len(free) > 1)
    assert free == ["behind it", "half sent"]
    await until(lambda: channel.is_up and network.ends[0]._wire._write_blocked)
    channel.close()
    assert len(free) == 2
    await asyncio.wait_for(dialling, 30)
    assert free == ["behind it", "half sent", "of another step"]


@pytest.mark.parametrize("said", [5e-324, 0.0, 0.9, -1e6, 1e300, math.inf, math.nan, 10**6, "fast"])
async def test_a_rate_that_no_line_has_is_not_believed(said: object) -> None:
    """With one of next to nothing a bundle takes for ever, and that was the end of whoever counted on it."""
    rates: list[float] = []

    class Listens(Kept):
        async def beat(self, channel: Channel) -> None:
            rates.append(channel.rate)

    async def says(stream: Stream) -> None:
        await stream.receive()
        await stream.send({"has": 0})
        for rate in (said, 1e6, said):
            await stream.send({"a": 0, "r": rate})
        await stream.receive(timeout_s=30)

    channel = Channel("them", "a", Listens(), LIMIT)
    dialling = asyncio.create_task(dial(Loopback(says), "test", channel))  # type: ignore[arg-type]
    await until(lambda: len(rates) >= 3)
    assert rates[:3] == [0.0, 1e6, 1e6]
    channel.close()
    await asyncio.wait_for(dialling, 30)


async def test_a_bad_frame_stops_its_own_channel_only() -> None:
    kept: dict[str, Kept] = {}

    def accept(_peer: str, key: str) -> Kept:
        kept[key] = Kept(lambda header: header["i"] == 1)
        return kept[key]

    network = Loopback(ChannelServer(accept, LIMIT).handle)
    channel = Channel("them", "bad", Kept(), LIMIT)
    for i in range(3):
        channel.send(parcel(i))
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    await until(lambda: network.opened >= 3)
    assert [i for i, _ in kept["bad"].frames] == [0]
    channel.outbox.forget(0)  # its step is over: nobody waits for it any more
    channel.send(parcel(10))
    await until(lambda: len(kept["bad"].frames) == 2)
    assert [i for i, _ in kept["bad"].frames] == [0, 10]
    channel.close()
    await asyncio.wait_for(dialling, 30)


async def test_a_channel_that_is_closed_while_a_stream_for_it_opens_is_not_used_any_more() -> None:
    """Nor does its other side hear of it: it would take that for a new one."""
    used: list[str] = []

    class Noted(Kept):
        def up(self, channel: Channel) -> None:
            used.append(channel.key)

    class ClosesMeanwhile(Loopback):
        async def open(self, peer: str, protocol: str, *, timeout_s: float) -> Stream:
            stream = await super().open(peer, protocol, timeout_s=timeout_s)
            channel.close()
            return stream

    def accept(_peer: str, key: str) -> Kept:
        used.append(key)
        return Kept()

    channel = Channel("them", "a", Noted(), LIMIT)
    network = ClosesMeanwhile(ChannelServer(accept, LIMIT).handle)
    await asyncio.wait_for(dial(network, "test", channel), 30)  # type: ignore[arg-type]
    await until(lambda: bool(network.ended))
    stream = await network.open("them", "test", timeout_s=5.0)
    await channel.carry(stream, 0)
    assert stream.broken
    assert not used


async def test_a_second_stream_does_not_make_a_frame_count_twice() -> None:
    """The peer opens a new stream while the handler of the old one still works on a frame."""
    working, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Kept):
        async def frame(
            self, channel: Channel, header: Mapping[str, Any], payload: Stream, length: int
        ) -> None:
            working.set()
            await go_on.wait()
            await super().frame(channel, header, payload, length)

    slow = Slow()
    network = Loopback(ChannelServer(lambda _peer, _key: slow, LIMIT).handle)
    channel = Channel("them", "a", Kept(), LIMIT)
    channel.send(parcel(0, 0))
    dialling = asyncio.create_task(dial(network, "test", channel))  # type: ignore[arg-type]
    await asyncio.wait_for(working.wait(), 30)
    network.ends[0].abort()
    await until(lambda: network.opened == 2)
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(channel.drained(), 30)
    assert [i for i, _ in slow.frames] == [0]
    channel.close()
    await asyncio.wait_for(dialling, 30)
