"""Direct streams past p2pd: TCP with TLS to peers whose port can be reached (links.md, "Direct lanes").

The first stream to a peer goes over libp2p. Meanwhile the peer is asked for its direct port
(tls_listener.py), and that is tried. If it answers, the streams over libp2p are cut, their owners open them
again, and these and later ones go to that port. Otherwise nothing changes, and it is tried again later.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError, short_id
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.direct.tls_listener import (
    INTRODUCTION_S,
    MAX_PROTOCOL,
    PROTOCOL,
    TlsListener,
    invitation,
    prepare,
)
from hetpeer.dht.identity.addresses import relay_in, socket_in
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.p2pd.listener import CONTROL, Listener
from hetpeer.dht.p2pd.p2pd_process import NodeConfig
from hetpeer.dht.p2pd.tcp_probe import unverified_tls
from hetpeer.dht.streams.byte_transport import ByteTransport
from hetpeer.dht.streams.stream import Stream

CONNECT_S = 2.0
RETRY_S = (5.0, 60.0, 600.0)
"""Seconds after a failed attempt; the last value repeats."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DirectPort:
    """A peer's direct port, the certificate expected there, and the ticket that we show."""

    host: str
    port: int
    certificate: bytes
    ticket: bytes


class DirectStreams:
    """All direct streams of one node. `protocols`: those that go directly; their owners reopen streams."""

    def __init__(
        self, config: NodeConfig, listener: Listener, session: Callable[[], Awaitable[NetworkSession]]
    ) -> None:
        self.protocols: set[str] = set()
        self._tls_listener = TlsListener(config.host, config.direct_port or 0, listener)
        self._has_port = config.direct_port is not None
        self._listener = listener
        self._session = session
        self._context = unverified_tls()  # `_dial` compares its bytes
        self.leads: dict[str, DirectPort] = {}
        """Peer → its direct port, to which new streams go for the protocols that may."""
        self._failures: dict[str, tuple[int, float]] = {}
        """Peer → (number of failed attempts, loop time of the next one)."""
        self._seeking: set[str] = set()
        self._over_libp2p: WeakSet[Stream] = WeakSet()
        """Streams over libp2p that could go directly."""
        self._streams: WeakSet[Stream] = WeakSet()
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Open our own direct port if configured. If that fails, others use libp2p."""
        if not self._has_port:
            return
        try:
            await self._tls_listener.start()
        except OSError as error:
            _log.warning("no direct port, so other peers reach this one through p2pd only: %s", error)
            return
        self._listener.serve(PROTOCOL, self._tls_listener.handle, CONTROL)

    async def open(self, peer_id: str, protocol: str, timeout_s: float) -> Stream | None:
        """A direct stream; None if there is no way, known within `timeout_s` and CONNECT_S."""
        lead = self.leads.get(peer_id)
        if lead is None:
            return None
        try:
            return await self._dial(lead, peer_id, protocol, min(timeout_s, CONNECT_S))
        except PeerLostError as error:
            self._failed(peer_id, error)
            return None

    async def find_way(self, peer_id: str) -> bool:
        """Look once for a direct way to a connected peer; returns whether one is known then.

        Nothing is tried while somebody else looks, or before the next attempt is due after a failed one.
        """
        due = self._failures.get(peer_id, (0, 0.0))[1]
        if peer_id in self.leads or peer_id in self._seeking or asyncio.get_running_loop().time() < due:
            return peer_id in self.leads
        self._seeking.add(peer_id)
        try:
            await self._is_settled(peer_id)
        finally:
            self._seeking.discard(peer_id)
        return peer_id in self.leads

    def seek_direct_way(self, stream: Stream) -> None:
        """Note that `stream` goes over libp2p, and look for a direct way once the next attempt is due."""
        peer = stream.peer_id
        self._over_libp2p.add(stream)
        if peer in self._seeking:
            return
        self._seeking.add(peer)
        self._tasks.spawn(self._seek(peer), name=f"direct way to {peer}")

    def cut(self) -> None:
        """Break all direct streams: after a suspension connections may be dead without knowing."""
        for stream in list(self._streams):
            stream.abort()

    async def close(self) -> None:
        """Stop looking for ways, close our direct port, and break all direct streams."""
        await self._tasks.close()
        await self._tls_listener.close()
        self.cut()

    async def _seek(self, peer: str) -> None:
        """Try again and again while there is no direct way and any stream to the peer goes over libp2p."""
        try:
            while any(stream.peer_id == peer and not stream.broken for stream in list(self._over_libp2p)):
                wait_s = self._failures.get(peer, (0, 0.0))[1] - asyncio.get_running_loop().time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                elif await self._is_settled(peer):
                    return
        finally:
            self._seeking.discard(peer)

    async def _is_settled(self, peer: str) -> bool:
        """Try once. False if a later attempt may succeed."""
        try:
            control = (await self._session()).control
            host = _host_of(peer, await control.connections())
            if not host:
                return True  # there is a relay between us; once it is gone, streams are opened anew
            lead = DirectPort(host, *await _asked(await control.open_stream(peer, PROTOCOL, INTRODUCTION_S)))
            # it answers, and knows our ticket
            await _asked(await self._dial(lead, peer, PROTOCOL, CONNECT_S))
        except ProtocolError as error:
            self._listener.offended(peer, error)
        except RemoteError as error:
            self._failed(peer, error)
            return False
        else:
            _log.info("%s is reached directly now, without p2pd", short_id(peer))
            self.leads[peer] = lead
            self._failures.pop(peer, None)
            for stream in [stream for stream in self._over_libp2p if stream.peer_id == peer]:
                stream.abort()
        return True

    async def _dial(self, lead: DirectPort, peer: str, protocol: str, timeout_s: float) -> Stream:
        """Open a stream to `peer`'s direct port. Raises `PeerLostError`, also for another certificate."""
        name = protocol.encode()
        assert len(name) <= MAX_PROTOCOL
        try:
            async with asyncio.timeout(timeout_s):
                _, wire = await asyncio.get_running_loop().create_connection(
                    partial(_DirectTransport, partial(self._turned_away, peer, lead)),
                    lead.host,
                    lead.port,
                    ssl=self._context,
                    server_hostname="",
                )
        except (OSError, TimeoutError) as error:
            raise PeerLostError(peer, f"its direct port does not open: {error or 'time-out'}") from error
        if not hmac.compare_digest(wire.certificate, lead.certificate):
            wire.abort()
            raise PeerLostError(peer, "somebody else answers at its direct port")
        prepare(wire)
        await wire.write([lead.ticket, bytes([len(name)]), name])  # so short that it need not wait
        stream = Stream(wire, peer_id=peer, protocol=protocol)
        self._streams.add(stream)
        return stream

    def _turned_away(self, peer: str, lead: DirectPort) -> None:
        """Fall back to libp2p: the peer's direct port no longer knows us, or does not serve us."""
        if self.leads.get(peer) is lead:
            self._failed(peer, PeerLostError(peer, "its direct port closed before a word came"))

    def _failed(self, peer: str, error: RemoteError) -> None:
        _log.debug("no direct way to %s: %s", peer, error)
        self.leads.pop(peer, None)
        times = self._failures.get(peer, (0, 0.0))[0]
        wait_s = RETRY_S[min(times, len(RETRY_S) - 1)]
        self._failures[peer] = times + 1, asyncio.get_running_loop().time() + wait_s


class _DirectTransport(ByteTransport):
    """A connection to a peer's direct port; calls `turned_away` if it ends before its first byte."""

    def __init__(self, turned_away: Callable[[], None]) -> None:
        super().__init__()
        self._turned_away = turned_away

    def eof_received(self) -> None:
        self._ends()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends()
        super().connection_lost(exc)

    def _ends(self) -> None:
        if self.lost is None and not self.delivery.nbytes:
            self._turned_away()


def _host_of(peer: str, connections: Iterable[tuple[str, str]]) -> str:
    """IP address of a peer that is connected without a relay; empty if it is not."""
    places = (socket_in(text) for one, text in connections if one == peer and not relay_in(text))
    return next((place[0] for place in places if place is not None), "")


async def _asked(stream: Stream) -> tuple[int, bytes, bytes]:
    async with stream:
        await stream.send({}, timeout_s=INTRODUCTION_S)
        frame = await stream.receive(payload_limit=0, timeout_s=INTRODUCTION_S)
        return invitation(frame.header, stream.peer_id)
