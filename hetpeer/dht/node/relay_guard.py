"""Driver of the guests of our relay: strangers are asked whether they speak hetpeer, and sent away."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection

from hetpeer.dht.base.errors import PeerLostError, RemoteError
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.identity.addresses import relay_in
from hetpeer.dht.p2pd.listener import Listener
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.reach.dialback import PROTOCOL
from hetpeer.dht.reach.relay_guests import RelayGuests

EXPECTED_S = 30.0
"""Seconds between two readings of who is of the run."""
_ASK_S = 5.0
_NOT_SPOKEN = "protocols not supported"
"""p2pd's words for a peer that is there and does not serve a protocol."""

Expected = Callable[[], Awaitable[Collection[str]]]

_log = logging.getLogger(__name__)


class RelayGuard:
    """Looks at the connections of a p2pd that relays for others."""

    def __init__(self, listener: Listener, clock: Clock) -> None:
        self.expected: Expected | None = None
        """The peers of the run that we relay for; None: peers of any run."""
        self._listener = listener
        self._clock = clock
        self._guests = RelayGuests()
        self._known: Collection[str] | None = None
        self._read_at = -EXPECTED_S

    async def look(self, control: P2pdControl) -> None:
        """Ask and dismiss the guests for whom it is time. Raises `P2pdError`."""
        connected = {peer for peer, text in await control.connections() if not relay_in(text)}
        known, now = await self._peers_of_the_run(), self._clock.monotonic()
        changes = self._guests.look(connected, known, self._listener.peers, now)
        for peer in changes.ask:
            ours = await _speaks_hetpeer(control, peer)
            if ours is not None:
                self._guests.answered(peer, self._clock.monotonic(), ours=ours)
        for peer in changes.dismiss:
            _log.info("%s is not of this run, or of none: its connection to our relay is closed", peer)
            await control.disconnect(peer)

    async def _peers_of_the_run(self) -> Collection[str] | None:
        """Peers to relay for, read anew when it is time; None: all that speak hetpeer, as after a failure."""
        if self.expected is None:
            return None
        if self._clock.monotonic() - self._read_at >= EXPECTED_S:
            self._read_at = self._clock.monotonic()
            try:
                self._known = await self.expected()
            except RemoteError as error:
                self._known = None
                _log.debug("who is of the run is not known: %s", error)
        return self._known


async def _speaks_hetpeer(control: P2pdControl, peer: str) -> bool | None:
    """Whether `peer` serves the protocol that all peers of hetpeer serve; None: it did not answer."""
    try:
        wire = await control.open_wire(peer, PROTOCOL, _ASK_S)
    except PeerLostError as error:
        return False if _NOT_SPOKEN in error.why else None
    wire.abort()
    return True
