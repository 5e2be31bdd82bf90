"""Streams to peers without a possible direct connection, through a relay where both sides have a slot.

Two peers that others reach may not reach each other (a filter, a broken route). Each keeps slots at reliable
peers (relay_slots.py) for those who cannot connect, and a peer that cannot reach another tries the relays
that it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from hetpeer.dht.identity.addresses import Address, through
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.streams.stream import Stream

HEAD_START_S = 1.5
"""Seconds for the direct attempt alone: a possible connection takes less, also between continents."""
_CONNECT_S = 5.0

_log = logging.getLogger(__name__)


class RelayedStreams:
    """Opens streams, and remembers which peers needed a relay."""

    def __init__(self) -> None:
        self._needed: set[str] = set()

    def reached(self, peers: Iterable[str]) -> None:
        """Note direct connections to `peers`."""
        self._needed.difference_update(peers)

    async def open(
        self, control: P2pdControl, peer_id: str, protocol: str, timeout_s: float, relays: Iterable[Address]
    ) -> Stream:
        """A new stream, direct or through one of `relays`. Raises `PeerLostError` after at most
        `timeout_s`.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        direct = asyncio.ensure_future(control.open_stream(peer_id, protocol, timeout_s))
        try:
            await asyncio.wait([direct], timeout=0 if peer_id in self._needed else HEAD_START_S)
            opened = direct.done() and direct.exception() is None
            if opened or not await self._go_round(control, peer_id, relays, deadline):
                return await direct
            stream = await control.open_stream(peer_id, protocol, _until(deadline))
        except BaseException:
            _drop(direct)
            raise
        else:
            _drop(direct)
            return stream
        finally:
            del direct  # else its exception, which refers to this frame, would keep both alive

    async def _go_round(
        self, control: P2pdControl, peer_id: str, relays: Iterable[Address], deadline: float
    ) -> bool:
        """Connect to an unconnected peer through a relay; whether that made a connection."""
        for relay in relays:
            left_s = _until(deadline)
            if relay.peer_id == peer_id or not left_s:
                continue
            try:
                if peer_id in {peer for peer, _ in await control.connections()}:
                    return False
                await control.connect(through(relay, peer_id), min(_CONNECT_S, left_s))
            except P2pdError as error:
                _log.debug("%s is not reached through %s: %s", peer_id, relay.peer_id, error)
                continue
            self._needed.add(peer_id)
            _log.info("%s is reached through the relay %s", peer_id, relay.peer_id)
            return True
        return False


def _until(deadline: float) -> float:
    """Seconds that are left; 0 if none."""
    return max(0.0, deadline - asyncio.get_running_loop().time())


def _drop(opening: asyncio.Future[Stream]) -> None:
    """Close a stream that nobody waits for any more, once it is open."""

    def end(opening: asyncio.Future[Stream]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().abort()

    opening.cancel()
    opening.add_done_callback(end)
