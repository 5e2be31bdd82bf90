"""`Node`: a peer's place in the network, for as long as the process lives.

It owns one `NetworkSession` at a time and supervises it: when p2pd dies, a new one starts with the same
identity, port, handlers and stored records. Callers see streams break, and `open` waits for a second or two.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Self

from hetpeer.dht.base.errors import PeerLostError, RemoteError
from hetpeer.dht.base.runtime import Clock, SystemClock, TaskSet
from hetpeer.dht.direct.direct_streams import DirectStreams
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.identity.peer_identity import Identity, hold
from hetpeer.dht.kademlia.first_contact import CONNECT_DEADLINE_S
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.kademlia.table import KnownKeys, Table
from hetpeer.dht.node.relay_guard import RelayGuard
from hetpeer.dht.node.session_series import SessionSeries
from hetpeer.dht.node.session_upkeep import SessionUpkeep
from hetpeer.dht.p2pd.listener import DATA, Handler, Listener, StreamBudget
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.p2pd.p2pd_process import NodeConfig
from hetpeer.dht.reach import dialback, whereabouts
from hetpeer.dht.reach.connection_monitor import ConnectionMonitor
from hetpeer.dht.reach.dialback import DialBack
from hetpeer.dht.reach.reachability import PeerPath, ReachEstimate
from hetpeer.dht.reach.whereabouts import Whereabouts
from hetpeer.dht.streams.stream import Stream

WITNESSES = 2
"""Peers outside our network that must have reached us at an address before others are told: one may lie."""
SEARCH_AFTER_S = 1.5
"""Seconds that a sought peer may take to answer before others are asked where it is."""
CALLS_S = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, *(120.0,) * 12)
"""Seconds before each call of others: a router may need minutes until its line is up again."""

__all__ = ["Node", "NodeConfig"]

_log = logging.getLogger(__name__)


class Node:
    """One peer in the network. Start it with `Node.start`, end it with `close`.

    `repr` shows its state. All methods belong to the event loop that started it.

        node = await Node.start(NodeConfig(port=31330), Identity.load_or_create(Path("key")))
        await node.serve("example/1", handler)  # async def handler(stream: Stream) -> None
        async with await node.open(peer_id, "example/1") as stream:
            await stream.send({"kind": "question"})
        await node.close()
    """

    def __init__(self, config: NodeConfig, identity: Identity, clock: Clock) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self._clock = clock
        self._begun = clock.monotonic()
        self._host = config.host
        self._listens_for_all = config.reachability == "public"
        self._closed = False
        self.listener = Listener()
        """Incoming streams: limits, offences, who is a stranger, and the byte counts of both directions."""
        self._watch = ConnectionMonitor(identity.peer_id, clock)
        self.direct = DirectStreams(config, self.listener, self.session)
        """Streams past libp2p."""
        self.relay_guard = RelayGuard(self.listener, clock)
        """Guests of our relay, if we are one."""
        keys = KnownKeys()
        self._sessions = SessionSeries(config, identity, clock, self.listener, self._watch, keys)
        self._session: NetworkSession | None = None
        self._tasks = TaskSet()
        self._up = asyncio.Event()
        self._lock: int | None = None
        self._calls: asyncio.Task[None] | None = None
        self.restarts = 0
        """Number of times p2pd was started again."""
        self.dht = Table(self.session, identity.peer_id, clock, keys)

    @classmethod
    async def start(cls, config: NodeConfig, identity: Identity, *, clock: Clock | None = None) -> Self:
        """Join the network; on return the node serves and its peers know it.

        Raises `LocalError`: HP-NET-001 port taken, HP-NET-002 no peer answers, HP-NET-003 p2pd does not
        start, HP-NET-004 clock off, HP-ID-002 identity in use. On error or cancellation nothing is left.
        """
        node = cls(config, identity, clock or SystemClock())
        try:
            node._lock = hold(identity.path)
            await node.listener.start()
            await node.direct.start()
            node.listener.handlers[dialback.PROTOCOL] = node._dialback().handle
            contacts = node._sessions.contacts
            answers = Whereabouts(contacts.book, node._control, contacts.learn)
            node.listener.handlers[whereabouts.PROTOCOL] = answers.handle
            node._session = await node._sessions.first()
        except BaseException:
            await node.close()
            raise
        node._up.set()
        node._tasks.spawn(node._supervise(), name="p2pd supervisor")
        for name, job in node._upkeep().jobs().items():
            node._tasks.spawn(job, name=name)
        return node

    @property
    def up_s(self) -> float:
        """Seconds since the start of the node."""
        return self._clock.monotonic() - self._begun

    @property
    def is_up(self) -> bool:
        """Whether p2pd runs and the node is not closed."""
        return self._up.is_set() and not self._closed

    @property
    def p2pd_pid(self) -> int | None:
        """The process id of the running p2pd; None between two."""
        return self._session.p2pd.pid if self._session is not None and self.is_up else None

    def addresses(self) -> list[str]:
        """Addresses at which others reach us, each with `/p2p/<peer_id>`.

        First a forwarded port that WITNESSES peers confirm, then those of p2pd; refreshed every few seconds.
        """
        own = self._session.addresses if self._session is not None else ()
        there = self._sessions.reaching.forwarded(own, WITNESSES) if own else None
        return [str(address) for address in (*((there,) if there else ()), *own)]

    @property
    def reach_estimate(self) -> ReachEstimate:
        """Whether others can open connections to us, as far as it is known."""
        return self._sessions.reaching.estimate

    @property
    def relays(self) -> list[str]:
        """The relays through which we are reached; empty if we accept connections ourselves."""
        return self._watch.relays

    def path(self, peer_id: str) -> PeerPath | None:
        """The path to a peer, at most seconds old; None if there is no connection."""
        return self._watch.paths.of(peer_id)

    def may_cut(self, *protocols: str) -> None:
        """Let a direct path replace our relayed streams for these protocols; their owners reopen them."""
        self._watch.resumable.update(protocols)

    def may_go_directly(self, *protocols: str) -> None:
        """Send our streams for these protocols past libp2p where that is possible (direct_streams.py).

        Streams over libp2p are cut when such a way is found; their owners must open them again.
        """
        self.direct.protocols.update(protocols)

    async def serve(self, protocol: str, handler: Handler, budget: StreamBudget = DATA) -> None:
        """Run `handler` for each stream that a peer opens for `protocol`, also after restarts of p2pd.

        `budget` bounds the open streams. A stream ends when its handler returns or raises `RemoteError`.
        """
        self.listener.serve(protocol, handler, budget)
        session = await self.session()
        try:
            await session.serve(protocol)
        except P2pdError:
            if not session.p2pd.exited.is_set():  # else the next session registers it
                raise

    async def open(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> Stream:
        """A new stream to `peer_id`, possibly our own. Raises `PeerLostError` within `timeout_s`."""
        if peer_id == self.peer_id:
            return await self.listener.open_own(peer_id, protocol)
        deadline = asyncio.get_running_loop().time() + timeout_s
        goes_directly = protocol in self.direct.protocols
        if goes_directly and (direct := await self.direct.open(peer_id, protocol, timeout_s)) is not None:
            self.listener.mind(direct)
            return direct
        try:
            async with asyncio.timeout_at(deadline):
                session = await self.session()
                there = session.gate is None or await session.gate(peer_id)
        except P2pdError as error:
            raise PeerLostError(peer_id, error.why) from error
        except TimeoutError:
            raise PeerLostError(peer_id, "our own network process is being restarted") from None
        left_s = max(0.1, deadline - asyncio.get_running_loop().time())
        stream = await self._watch.open(session.control, peer_id, protocol, left_s, there=there)
        self.listener.mind(stream)
        if goes_directly:
            self.direct.seek_direct_way(stream)
        return stream

    async def open_directly(self, peer_id: str, protocol: str, *, timeout_s: float) -> Stream | None:
        """A stream past libp2p to a connected peer, looked for at once; None if none is found in time."""
        try:
            async with asyncio.timeout(timeout_s):
                if not await self.direct.find_way(peer_id):
                    return None
                stream = await self.direct.open(peer_id, protocol, timeout_s)
        except TimeoutError:
            return None
        if stream is not None:
            self.listener.mind(stream)
        return stream

    @contextmanager
    def reaching(self, peer_id: str) -> Iterator[None]:
        """Context in which `peer_id` is to answer: others are asked where it is if it fails, or is slow.

        An opened stream proves nothing: libp2p opens streams over a dead connection without asking the peer.
        """
        contacts = self._sessions.contacts
        slow = asyncio.get_running_loop().call_later(SEARCH_AFTER_S, contacts.miss, peer_id)
        try:
            yield
        except RemoteError:
            contacts.miss(peer_id)
            raise
        else:
            contacts.found(peer_id)
        finally:
            slow.cancel()

    def call_others(self, before: Sequence[Address] = ()) -> None:
        """Call the peers met lately, and those at the addresses `before` that were met before this start.

        They may look for us elsewhere. A peer that many others call goes on until it hears somebody.
        """
        self._sessions.contacts.meet(before)
        if self._calls is not None:
            self._calls.cancel()
        self._calls = self._tasks.spawn(self._call_others(), name="calls to others")

    async def _call_others(self) -> None:
        """Call others, more and more seldom, until one has a stream to us. Raises `PeerLostError`."""
        if self._listens_for_all:
            self._sessions.reaching.forget()
        for pause_s in CALLS_S if self._listens_for_all else CALLS_S[:1]:
            await asyncio.sleep(pause_s)
            if pause_s and self.listener.peers - {self.peer_id}:
                return
            await self._sessions.call_back(await self.session())

    async def connect(self, address: Address) -> None:
        """Connect to a peer at a known address. Raises `PeerLostError`."""
        session = await self.session()
        try:
            await session.control.connect(address, CONNECT_DEADLINE_S)
        except P2pdError as error:
            raise PeerLostError(address.peer_id, error.why) from error

    async def session(self) -> NetworkSession:
        """The running session, once there is one: give a deadline. Raises `PeerLostError` after `close`."""
        while True:
            await self._up.wait()
            if self._closed:
                raise PeerLostError(self.peer_id, "this node is closed")
            if self._session is not None:
                return self._session

    async def renew(self) -> None:
        """Restart p2pd: after a suspension of the machine its connections may be dead without knowing.

        Streams break. Raises `PeerLostError` once the node is closed.
        """
        self.direct.cut()
        session = await self.session()
        await session.p2pd.close()

    async def close(self) -> None:
        """Leave the network within 5 s: supervision, handlers, DHT, p2pd, in this order. Idempotent."""
        self._closed = True
        self._up.set()  # callers that wait learn that it is over
        await self._tasks.close()
        await self._watch.close()
        await self.direct.close()
        await self.listener.close()
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _supervise(self) -> None:
        """Replace each session that dies. Never gives up: the network may come back."""
        while True:
            session = self._session
            assert session is not None
            await session.p2pd.exited.wait()
            self._up.clear()
            if not session.p2pd.closing:
                _log.warning("p2pd %d died and is started again: %s", session.p2pd.pid, session.p2pd.tail())
            previous = session.dht
            await session.close()
            self._session = session = await self._sessions.next(previous)
            self.restarts += 1
            self._up.set()
            self.call_others()

    def _upkeep(self) -> SessionUpkeep:
        return SessionUpkeep(
            own_id=self.peer_id,
            session=self.session,
            sessions=self._sessions,
            monitor=self._watch,
            listener=self.listener,
            relay_guard=self.relay_guard,
            clock=self._clock,
            listens_for_all=self._listens_for_all,
            call_others=self.call_others,
            renew=self.renew,
        )

    def _control(self) -> P2pdControl | None:
        """p2pd's client while p2pd runs."""
        return self._session.control if self._session is not None and self.is_up else None

    def _dialback(self) -> DialBack:
        async def hints(asker: str) -> tuple[Sequence[str], Sequence[str]]:
            return await self._sessions.reaching.hints(await self.session(), asker)

        loopback = ip_address(self._host).is_loopback
        return DialBack(self._control, self._clock, hints, loopback=loopback)

    def __repr__(self) -> str:
        state = "up" if self.is_up else "down"
        return (
            f"<Node {self.peer_id} {state}, {self.restarts} restarts, {len(self.listener)} incoming streams>"
        )
