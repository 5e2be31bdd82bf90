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
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import dial
from hetpeer.dht.channels.redial import REACH_TIMEOUT_S, RENEWAL_S
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.stream import Stream

SEARCH_S = 10.0
"""Seconds between two searches for amendments (`ask_others`) while no stream to a coordinator is open."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ControlSession:
    """The control stream to the coordinator. Each reliable peer of `membership_config` is tried in turn.

    Only the coordinator accepts the stream. `opened` is called at the start of each session and says Hello
    through `tell`; `received` gets each message. `evidence` yields the lines of our event log after a given
    line, in batches: the coordinator names the last line that it has. `ask_others` is called every SEARCH_S
    without a coordinator: it fetches amendments, which may have replaced the reliable peers.
    """

    _node: Node
    _membership_config: MembershipConfig
    _opened: Callable[[], None]
    _received: Callable[[m.Message], None]
    _evidence: Callable[[str], Iterator[Sequence[str]]]
    _ask_others: Callable[[], Awaitable[None]]
    _tried: int = 0
    """Number of sessions that ended because the peer was lost; each makes us try the next peer."""
    _has_all: bool = False
    """Whether all lines were sent in this session; further lines are then sent as they are written."""
    _catching_up: asyncio.Task[None] | None = None
    _channel: Channel | None = None
    leaving: bool = False
    released: m.Released | None = None
    """The coordinator's answer to our farewell; None before."""
    _parted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the coordinator has answered our farewell, or the session with it is over."""

    @property
    def is_up(self) -> bool:
        """Whether a stream to the coordinator is open."""
        return self._channel is not None and self._channel.is_up

    @property
    def coordinator(self) -> str:
        """The reliable peer that we take to be the coordinator."""
        return self._membership_config.peers[self._tried % len(self._membership_config.peers)]

    async def run(self, incarnation: Callable[[], int]) -> None:
        """Hold one session after another until `farewell` or `close`. Raises `LocalError` HP-DISK-*.

        A session's key is "incarnation.number". `incarnation` is called for each session, since a fenced
        volunteer gets a higher number.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            search = tasks.create_task(self._look_for_coordinators())
            number = 0
            while not self.leaving:
                number += 1
                await self._hold_session(f"{incarnation()}.{number}")
                await asyncio.sleep(RENEWAL_S)
            search.cancel()

    async def _hold_session(self, key: str) -> None:
        """Hold one session until it ends."""
        self._channel = channel = Channel(self.coordinator, key, self, payload_limit=m.MAX_MESSAGE_BYTES)
        self._has_all = False
        self._opened()
        try:
            await dial(
                self._node,
                CONTROL_PROTOCOL,
                channel,
                REACH_TIMEOUT_S if len(self._membership_config.peers) > 1 else math.inf,
            )
        except PeerLostError as error:
            _log.info("new session with the coordinator: %s", error.why)
            self._tried += 1
        finally:
            channel.close()  # ends the tasks that wait for the channel to drain
            if self._catching_up is not None:
                self._catching_up.cancel()
            self._channel = None
            if self.leaving:
                self._parted.set()

    async def _look_for_coordinators(self) -> None:
        while True:
            await asyncio.sleep(SEARCH_S)
            if self.is_up:
                continue
            await self._ask_others()
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

    async def farewell(self, within_s: float = 0.0) -> None:
        """Say that we leave; returns when the coordinator knows it, at once when there is none.

        With `within_s` seconds left for what we alone hold: returns when the coordinator releases us, or the
        session ends. The caller sets a deadline.
        """
        self.leaving = True
        if self.is_up and self._channel is not None and self.released is None:
            self.tell(m.Farewell(within_s=within_s))
            await self._channel.drained()
            if within_s > 0.0:
                await self._parted.wait()

    def close(self) -> None:
        """End the session without a word."""
        self.leaving = True
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
            self._send_lines(next(lacking, ()))
            more = next(lacking, None)
            self._has_all = more is None
            if more is not None:
                self._catching_up = self._tasks.create_task(self._catch_up(channel, [more], lacking))
        elif isinstance(message, m.Released):
            self.released = message
            self._parted.set()
        elif isinstance(message, m.Amended):
            self._membership_config.hear(message.amendment, channel.peer_id, instead=True)
        else:
            self._received(message)

    def _send_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.tell(m.EventLine(line=line))

    async def _catch_up(self, channel: Channel, *lacking: Iterable[Sequence[str]]) -> None:
        """Send `lacking` batch by batch, each once the channel has drained: other messages get between."""
        for lines in chain.from_iterable(lacking):
            await channel.drained()
            self._send_lines(lines)
        self._has_all = True

    async def beat(self, channel: Channel) -> None:
        """The coordinator is alive; its silence ends the stream by itself."""

    def up(self, channel: Channel) -> None:
        """A stream is open; messages of the session go on."""
        _log.debug("control stream is up: %r", channel)

    def down(self, channel: Channel) -> None:
        """The stream is broken; the channel opens another one."""
        _log.debug("control stream is down: %r", channel)
