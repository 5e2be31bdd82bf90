"""What an attacker has of the network: a libp2p host, and a control session over it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from typing import Any, Self, cast

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import dial
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.p2pd.p2pd_process import NodeConfig, P2pd
from hetpeer.dht.streams.stream import Stream

ANSWER_S, CONNECT_S = 20.0, 10.0


class Host:
    """A libp2p host without a DHT: all that an attacker needs, for a tenth of a node's processor time."""

    def __init__(self, p2pd: P2pd, identity: Identity) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self._p2pd = p2pd
        self._control = P2pdControl(p2pd.control_path)

    @classmethod
    async def start(cls, place: Address, host: str, identity: Identity) -> Self:
        """A host that is connected to `place`. Raises `LocalError` or `RemoteError`."""
        one = cls(await P2pd.start(NodeConfig(host=host), identity, port=0), identity)
        try:
            await one._control.connect(place, CONNECT_S)
        except BaseException:
            await one.close()
            raise
        return one

    async def open(self, peer: str, protocol: str, *, timeout_s: float = CONNECT_S) -> Stream:
        """A new stream. Raises `PeerLostError`."""
        return await self._control.open_stream(peer, protocol, timeout_s)

    def reaching(self, _peer: str) -> contextlib.AbstractContextManager[None]:
        """An attacker looks for nobody."""
        return contextlib.nullcontext()

    async def close(self) -> None:
        """End p2pd."""
        await self._p2pd.close()


class Session:
    """A control session of `node`, over a channel as the product's volunteers have it."""

    def __init__(self, node: Host, place: Address, key: str) -> None:
        self.channel = Channel(place.peer_id, key, self, m.MAX_MESSAGE_BYTES)
        self._dialling = asyncio.create_task(
            dial(cast("Node", node), CONTROL_PROTOCOL, self.channel, ANSWER_S)
        )
        self.welcome: m.Welcome | None = None
        self.welcomed = asyncio.Event()
        self.granted = asyncio.Event()

    def say(self, message: m.Message) -> int:
        """Queue a message; returns its bytes."""
        data = m.encode(message)
        self.channel.send(Parcel({}, (data,)))
        return len(data)

    async def reached(self, what: Awaitable[Any]) -> None:
        """Return when `what` has happened. Raises `RemoteError` or TimeoutError if the session ends."""
        waits = asyncio.ensure_future(what)
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.wait((waits, self._dialling), return_when=asyncio.FIRST_COMPLETED)
            if not waits.done():
                await self._dialling
                raise PeerLostError(self.channel.peer_id, "the session has ended")
        finally:
            waits.cancel()

    async def close(self) -> None:
        """End the session without a word."""
        self.channel.close()
        self._dialling.cancel()
        await asyncio.gather(self._dialling, return_exceptions=True)

    async def frame(
        self, _channel: Channel, _header: Mapping[str, Any], payload: Stream, length: int
    ) -> None:
        """Note what an attacker waits for."""
        told = m.decode(await payload.receive_bytes(length))
        if isinstance(told, m.Welcome):
            self.welcome = told
            self.welcomed.set()
        if isinstance(told, m.Granted):
            self.granted.set()

    async def beat(self, _channel: Channel) -> None:
        """Nothing."""

    def up(self, _channel: Channel) -> None:
        """Nothing."""

    down = up
