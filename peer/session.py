"""The volunteer's word with the coordinator: one control session after another, for as long as it takes part.

A session outlives broken streams (dht/channel.py). When the coordinator has lost its memory, or another reliable peer is the
coordinator now, a new one begins with a new Hello, and what is evidence is sent again: the audit counts volunteers' lines, so
none may be lost with a session.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.service import CONTROL
from hetpeer.dht.channel import Channel, dial
from hetpeer.dht.errors import PeerLostError
from hetpeer.dht.node import Node
from hetpeer.dht.outbox import Parcel
from hetpeer.dht.streams import Stream

EVIDENCE: Final = "evidence"
RENEWAL_S = 0.2
"""Between two sessions: a coordinator that forgets us again and again is not asked in a hot loop."""
PATIENCE_S = 3.0
"""A reliable peer that cannot be reached for so long is not the coordinator, where there are others."""

_log = logging.getLogger(__name__)


class ControlSession:
    """The control stream to the one of the `reliable` peers that is the coordinator: the others refuse it.

    `opened` is called at the start of each session and says Hello through `tell`; `received` gets each message.
    `unsent` are lines of evidence that an earlier life could not deliver; the list is kept up to date for the next one.
    """

    def __init__(
        self,
        node: Node,
        reliable: Sequence[str],
        opened: Callable[[], None],
        received: Callable[[m.Message], None],
        unsent: list[str],
    ) -> None:
        self._node = node
        self._reliable = reliable
        self._patience_s = PATIENCE_S if len(reliable) > 1 else math.inf
        self._turn = 0
        self._opened = opened
        self._received = received
        self._unsent = unsent
        self._channel: Channel | None = None
        self._leaving = False

    @property
    def is_up(self) -> bool:
        """Whether a stream to the coordinator is open."""
        return self._channel is not None and self._channel.is_up

    @property
    def coordinator(self) -> str:
        """Whom we take for the coordinator."""
        return self._reliable[self._turn % len(self._reliable)]

    async def run(self, incarnation: Callable[[], int]) -> None:
        """Keep a session open until we leave."""
        number = 0
        while not self._leaving:
            number += 1
            self._channel = channel = Channel(
                self.coordinator, f"{incarnation()}.{number}", self, payload_limit=m.MAX_MESSAGE_BYTES
            )
            self._opened()
            for line in self._unsent:
                self.give_evidence(line)
            self._unsent.clear()
            try:
                await dial(self._node, CONTROL, channel, self._patience_s)
            except PeerLostError as error:
                _log.info("new session with the coordinator: %s", error.why)
                self._turn += 1
            finally:
                self._channel = None  # what is given from now on waits for the next session
                self._unsent += _undelivered(channel)
            await asyncio.sleep(RENEWAL_S)

    def tell(self, message: m.Message) -> None:
        """Send a message; it is lost with the session if that ends before it arrives."""
        if self._channel is not None:
            self._channel.send(Parcel({}, (m.encode(message),)))

    def give_evidence(self, line: str) -> None:
        """Send a signed line of our event log; it is sent again in the next session if it does not arrive in this one."""
        if self._channel is None:
            self._unsent.append(line)
        else:
            self._channel.send(Parcel({}, (m.encode(m.EventLine(line=line)),), tag=(EVIDENCE, line)))

    def renew(self) -> None:
        """End this session; a new one begins."""
        if self._channel is not None:
            self._channel.close()

    async def farewell(self) -> None:
        """Say that we leave; returns when the coordinator knows it, at once when there is none."""
        self._leaving = True
        if self.is_up and self._channel is not None:
            self.tell(m.Farewell())
            await self._channel.drained()

    def close(self) -> None:
        """End the session without a word."""
        self._leaving = True
        self.renew()

    # ── the channel's receiver ───────────────────────────────────────────────────────────────────────────────────

    async def frame(
        self, channel: Channel, _header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        message = m.decode(await payload.receive_bytes(m.MAX_MESSAGE_BYTES))
        if channel is self._channel and not channel.closed:
            self._received(message)

    def beat(self, channel: Channel) -> None:
        """The coordinator is alive; its silence ends the stream by itself."""

    def up(self, channel: Channel) -> None:
        _log.debug("control stream is up: %r", channel)

    def down(self, channel: Channel) -> None:
        _log.debug("control stream is down: %r", channel)


def _undelivered(channel: Channel) -> list[str]:
    """The evidence that the coordinator has not acknowledged."""
    tags = [parcel.tag for _, parcel in channel.outbox]
    return [tag[1] for tag in tags if isinstance(tag, tuple) and tag[0] == EVIDENCE]
