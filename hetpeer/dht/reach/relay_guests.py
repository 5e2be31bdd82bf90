"""Guests of a relay: which connected peers may go on using it. Pure.

p2pd relays for anybody, and no flag of it names the peers that may. But a slot ends with its peer's
connection, and a circuit with the connection of either end. So a relay closes the connections of peers that
have no business here (docs/nat.md, "Relays").
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

GRACE_S = 60.0
"""Seconds until a connected peer is asked whether it speaks hetpeer."""
VISIT_S = 600.0
"""Seconds that a peer may stay which speaks hetpeer, is not of the run and says nothing."""
BARRED_S = 3600.0
"""Seconds for which a peer that does not speak hetpeer is turned away at once."""
MAX_BARRED = 4096


@dataclass(frozen=True, slots=True)
class GuestChanges:
    """Peers to ask whether they speak hetpeer, and peers whose connections are to be closed."""

    ask: tuple[str, ...] = ()
    dismiss: tuple[str, ...] = ()


class RelayGuests:
    """Memory of a relay about the peers that are connected to it."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """Connected peer → time at which it was first seen."""
        self._ours: set[str] = set()
        """Connected peers that speak hetpeer."""
        self._barred: dict[str, float] = {}
        """Peer that does not → time until which it is turned away."""

    def look(
        self, connected: Collection[str], expected: Collection[str] | None, busy: Collection[str], now: float
    ) -> GuestChanges:
        """Decide about the `connected` peers at time `now`, in seconds.

        `expected`: peers of the run; None: peers of any run are. `busy`: peers with an open stream to us.
        """
        self._since = {peer: self._since.get(peer, now) for peer in connected}
        self._ours &= self._since.keys()
        self._barred = {peer: until for peer, until in self._barred.items() if until > now}
        ask, dismiss = [], []
        for peer, since in self._since.items():
            if peer in busy or (expected is not None and peer in expected):
                continue
            if peer in self._barred:
                dismiss.append(peer)
            elif peer not in self._ours:
                if now - since >= GRACE_S:
                    ask.append(peer)
            elif expected is not None and now - since >= VISIT_S:
                dismiss.append(peer)
        return GuestChanges(tuple(ask), tuple(dismiss))

    def answered(self, peer: str, now: float, *, ours: bool) -> None:
        """Note whether `peer` speaks hetpeer."""
        if ours:
            self._ours.add(peer)
            return
        if len(self._barred) >= MAX_BARRED:
            del self._barred[next(iter(self._barred))]
        self._barred[peer] = now + BARRED_S
