"""Incoming streams: a unix socket to which p2pd connects each of them, and their handlers.

Direct streams come from tls_listener.py. The number of open streams is bounded for each peer and for all
strangers together (abuse.py), separately for data and for control: nobody can block the one by
hoarding the other. Volunteers of the step are no strangers. A peer with too many strikes is refused for a
while. The socket and the handlers outlive any one p2pd; a restarted one is only told the path again.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError, short_id
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.p2pd.p2pd_control import read_stream_info, stream_info
from hetpeer.dht.p2pd.p2pd_process import sockets_folder
from hetpeer.dht.streams.abuse import (
    FIRST_BYTE_S,
    MEMBER,
    STRANGER,
    DeliveryPace,
    PeerTraffic,
    Strikes,
    gives_way,
    has_share,
    kind_of,
)
from hetpeer.dht.streams.byte_transport import ByteTransport, Throttle
from hetpeer.dht.streams.stream import Stream

Handler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StreamBudget:
    """Limits on open incoming streams of some protocols. Each costs 16 KiB and two files (one in p2pd)."""

    per_peer: int
    strangers: int
    """Streams of all peers together that are no volunteers of the step."""
    pace: DeliveryPace
    """Delivery required of strangers."""


DATA = StreamBudget(per_peer=8, strangers=64, pace=STRANGER)
"""Tensors take three lanes, and a fourth while one is dialled again; files take the rest."""
CONTROL = StreamBudget(per_peer=4, strangers=1024, pace=MEMBER)
"""A session and its successor. Volunteers are strangers to a coordinator until they are admitted."""
_INTRODUCTION_DEADLINE_S = 5.0

Watcher = Callable[[str, bool], None]

_log = logging.getLogger(__name__)


class Listener:
    """Accepts streams and runs one handler task for each. A stream ends when its handler returns."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.throttle = Throttle()
        """Limit and count of all streams to and from other peers."""
        self._own = ""
        self._folder = sockets_folder()
        self._server: asyncio.Server | None = None
        self.reliable: Callable[[], Collection[str]] = tuple
        """The run's reliable peers, to which the limits on strangers do not apply either."""
        self.members: frozenset[str] = frozenset()
        """The volunteers of the steps that run: the limits on strangers do not apply to them."""
        self.watchers: list[Watcher] = []
        """Called with each peer that is refused from now on (True), or no longer (False)."""
        self.strikes = Strikes()
        self._budgets: dict[str, StreamBudget] = {}
        self._open: Counter[tuple[str, StreamBudget]] = Counter()
        self._traffic: weakref.WeakValueDictionary[str, PeerTraffic] = weakref.WeakValueDictionary()
        self._streams: dict[Stream, StreamBudget] = {}
        self._tasks = TaskSet()

    def knows(self, peer: str) -> bool:
        """Whether `peer` is no stranger: a volunteer of the step, or a reliable peer."""
        return peer in self.members or peer in self.reliable()

    @property
    def path(self) -> str:
        """The unix socket to which p2pd connects incoming streams."""
        return f"{self._folder.name}/streams.sock"

    def serve(self, protocol: str, handler: Handler, budget: StreamBudget = DATA) -> None:
        """Run `handler` for each stream of `protocol`."""
        self.handlers[protocol] = handler
        self._budgets[protocol] = budget

    @property
    def peers(self) -> set[str]:
        """Peers with an open incoming stream."""
        return {peer for peer, _ in self._open}

    def traffic(self, peer_id: str) -> PeerTraffic:
        """Bytes from a peer in all streams, opened by either side."""
        if (traffic := self._traffic.get(peer_id)) is None:
            traffic = self._traffic[peer_id] = PeerTraffic()
        return traffic

    def offended(self, peer_id: str, error: ProtocolError) -> None:
        """Count an offence; watchers are told when the peer is refused because of it."""
        loop = asyncio.get_running_loop()
        kind = kind_of(error)
        seconds = self.strikes.strike(peer_id, kind, loop.time())
        _log.info("%s: %s (%s)", short_id(peer_id), error.what, kind)
        if seconds:
            _log.warning("%s is refused for %.0f s: %s", short_id(peer_id), seconds, error.what)
            for stream in [stream for stream in self._streams if stream.peer_id == peer_id]:
                stream.abort()
            self._tell(peer_id, for_now=True)
            loop.call_later(seconds, lambda: self._tell(peer_id, for_now=False))

    def _tell(self, peer_id: str, *, for_now: bool) -> None:
        for watcher in list(self.watchers):
            watcher(peer_id, for_now)

    def mind(self, stream: Stream) -> None:
        """Judge a stream together with its peer's others, and apply the node's limits to it."""
        stream.count(self.traffic(stream.peer_id))
        if stream.peer_id != self._own:
            stream.throttle(self.throttle)

    async def start(self) -> None:
        """Listen on the unix socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: ByteTransport(self._accept), self.path)

    async def close(self) -> None:
        """Accept no more, cancel the handlers and wait for them. Idempotent."""
        if self._server is not None:
            self._server.close()
        await self._tasks.close()
        self._folder.cleanup()

    async def open_own(self, peer_id: str, protocol: str) -> Stream:
        """A stream to ourselves: libp2p cannot dial its own id, we act as p2pd. Raises `PeerLostError`."""
        try:
            _, wire = await asyncio.get_running_loop().create_unix_connection(ByteTransport, self.path)
        except OSError as error:
            raise PeerLostError(peer_id, error.strerror or str(error)) from error
        self._own = peer_id
        await wire.write([stream_info(peer_id, protocol)])
        return Stream(wire, peer_id=peer_id, protocol=protocol)

    def __len__(self) -> int:
        """Number of open incoming streams."""
        return self._open.total()

    def _accept(self, wire: ByteTransport) -> None:
        self._tasks.spawn(self._serve(wire), name="incoming stream")

    async def _serve(self, wire: ByteTransport) -> None:
        try:
            async with asyncio.timeout(_INTRODUCTION_DEADLINE_S):
                peer_id, address, protocol = await read_stream_info(wire)
        except (RemoteError, TimeoutError) as error:
            _log.debug("p2pd handed over no stream: %s", error)
            wire.abort()
            return
        except asyncio.CancelledError:
            wire.abort()
            raise
        await self.carry(wire, peer_id, address, protocol)

    async def carry(self, wire: ByteTransport, peer_id: str, address: str, protocol: str) -> None:
        """Serve a stream of the authenticated `peer_id` until its handler returns or it is refused."""
        handler, budget = self.handlers.get(protocol), self._budgets.get(protocol, CONTROL)
        stream = Stream(wire, peer_id=peer_id, protocol=protocol, address=address)
        if handler is None or not self._has_room(stream, budget):
            _log.debug("refused a stream of %s from %s", protocol, peer_id)
            wire.abort()
            return
        self._open[peer_id, budget] += 1
        self.mind(stream)
        stream.pace = MEMBER if self.knows(peer_id) else budget.pace
        self._streams[stream] = budget
        begun = asyncio.get_running_loop().call_later(FIRST_BYTE_S, stream.abort_unless_begun)
        try:
            async with stream:
                await handler(stream)
        except ProtocolError as error:
            self.offended(peer_id, error)
        finally:
            begun.cancel()
            del self._streams[stream]
            self._open[peer_id, budget] -= 1
            if not self._open[peer_id, budget]:
                del self._open[peer_id, budget]

    def _has_room(self, stream: Stream, budget: StreamBudget) -> bool:
        """Whether to take the stream; a useless stream of another stranger may give way to it."""
        peer, now = stream.peer_id, asyncio.get_running_loop().time()
        if self.strikes.refuses(peer, now) or self._open[peer, budget] >= budget.per_peer:
            return False
        if self.knows(peer):
            return True
        taken = [s for s, b in self._streams.items() if b is budget and not self.knows(s.peer_id)]
        if not has_share(stream.network, taken, budget.strangers):
            return False
        if len(taken) < budget.strangers:
            return True
        useless = gives_way(taken, now)
        if useless is not None:
            _log.debug("a stream of %s gives way to another stranger's", useless.peer_id)
            useless.abort()
        return useless is not None
