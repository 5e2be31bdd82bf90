"""The control sessions of a volunteer with the coordinator: one after another, as long as it takes part.

A session outlives broken streams (dht/channels/channel.py). When the coordinator has lost its memory, or
another reliable peer has become the coordinator, a new session begins with a new Hello, and evidence is sent
again: the audit counts volunteers' lines, so none may be lost with a session.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import dial
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.stream import Stream

RENEWAL_S = 0.2
"""Seconds between two sessions: a coordinator that forgets us again and again is not asked in a hot loop."""
PATIENCE_S = 3.0
"""A reliable peer that cannot be reached for so long is not the coordinator, where there are others."""
ASTRAY_S = 10.0
"""Without a coordinator, until others are asked who that may be."""

_log = logging.getLogger(__name__)


class ControlSession:
    """The control stream to that reliable peer of `council` that is the coordinator; the others refuse it.

    `opened` is called at the start of each session and says Hello through `tell`; `received` gets each
    message. `evidence` yields the lines of our event log after a given one, some at a time: the coordinator
    names the last one that it has. `astray` is called again and again while there is no coordinator: the
    reliable peers may be others by now.
    """

    def __init__(
        self,
        node: Node,
        membership_config: MembershipConfig,
        opened: Callable[[], None],
        received: Callable[[m.Message], None],
        evidence: Callable[[str], Iterator[Sequence[str]]],
        astray: Callable[[], Awaitable[None]],
    ) -> None:
        self._node = node
        self._membership_config = membership_config
        self._turn = 0
        self._opened = opened
        self._received = received
        self._evidence = evidence
        self._astray = astray
        self._has_all = False
        """Whether the coordinator has been sent all lines in this session: the next follow as they come."""
        self._catching_up: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._leaving = False

    @property
    def is_up(self) -> bool:
        """Whether a stream to the coordinator is open."""
        return self._channel is not None and self._channel.is_up

    @property
    def coordinator(self) -> str:
        """The reliable peer that we take to be the coordinator."""
        return self._membership_config.peers[self._turn % len(self._membership_config.peers)]

    async def run(self, incarnation: Callable[[], int]) -> None:
        """Keep a session open until we leave. Raises `LocalError` HP-DISK-*."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            looking = tasks.create_task(self._look_for_coordinators())
            number = 0
            while not self._leaving:
                number += 1
                await self._hold(f"{incarnation()}.{number}")
                await asyncio.sleep(RENEWAL_S)
            looking.cancel()

    async def _hold(self, key: str) -> None:
        """One session, until it ends."""
        self._channel = channel = Channel(self.coordinator, key, self, payload_limit=m.MAX_MESSAGE_BYTES)
        self._has_all = False
        self._opened()
        try:
            await dial(
                self._node,
                CONTROL_PROTOCOL,
                channel,
                PATIENCE_S if len(self._membership_config.peers) > 1 else math.inf,
            )
        except PeerLostError as error:
            _log.info("new session with the coordinator: %s", error.why)
            self._turn += 1
        finally:
            channel.close()  # tasks that wait for it to drain would wait for ever
            if self._catching_up is not None:
                self._catching_up.cancel()
            self._channel = None

    async def _look_for_coordinators(self) -> None:
        while True:
            await asyncio.sleep(ASTRAY_S)
            if self.is_up:
                continue
            await self._astray()
            if self._channel is not None and self._channel.peer_id not in self._membership_config.peers:
                self.renew()

    def tell(self, message: m.Message) -> None:
        """Send a message; it is lost with the session if that ends before it arrives."""
        if self._channel is not None:
            self._channel.send(Parcel({}, (m.encode(message),)))

    def give_evidence(self, line: str) -> None:
        """Send the newest line of our event log. If it does not arrive, the next session sends it again."""
        if self._has_all:
            self.tell(m.EventLine(line=line))

    def renew(self) -> None:
        """End this session; a new one begins."""
        if self._channel is not None:
            self._channel.close()

    async def farewell(self) -> None:
        """Say that we leave; returns when the coordinator knows it, at once when there is none.

        The caller sets a deadline.
        """
        self._leaving = True
        if self.is_up and self._channel is not None:
            self.tell(m.Farewell())
            await self._channel.drained()

    def close(self) -> None:
        """End the session without a word."""
        self._leaving = True
        self.renew()

    # ── the channel's receiver ──────────────────────────────────────────────────────────────────────────────

    async def frame(
        self, channel: Channel, _header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        """A message of the coordinator. Raises `ProtocolError` if it is malformed."""
        message = m.decode(await payload.receive_bytes(m.MAX_MESSAGE_BYTES))
        if channel is not self._channel or channel.closed:
            return
        if isinstance(message, m.Kept):
            lacking = self._evidence(message.last)
            self._give(next(lacking, ()))
            more = next(lacking, None)
            self._has_all = more is None
            if more is not None:
                self._catching_up = self._tasks.create_task(self._catch_up(channel, [more], lacking))
        elif isinstance(message, m.Amended):
            self._membership_config.hear(message.amendment, channel.peer_id, instead=True)
        else:
            self._received(message)

    def _give(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.tell(m.EventLine(line=line))

    async def _catch_up(self, channel: Channel, *lacking: Iterable[Sequence[str]]) -> None:
        """Months of lines are not said in one breath: what else there is to say comes between."""
        for lines in chain.from_iterable(lacking):
            await channel.drained()
            self._give(lines)
        self._has_all = True

    def beat(self, channel: Channel) -> None:
        """The coordinator is alive; its silence ends the stream by itself."""

    def up(self, channel: Channel) -> None:
        """A stream is open; messages of the session go on."""
        _log.debug("control stream is up: %r", channel)

    def down(self, channel: Channel) -> None:
        """The stream is broken; the channel opens another one."""
        _log.debug("control stream is down: %r", channel)
