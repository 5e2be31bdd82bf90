"""The network coordinate of this peer, kept while it takes part (docs/joining.md).

Round trips are those of links in use, and of a ping of somebody else now and then. Coordinates of others come
with the answers, and in their adverts.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from hetpeer.dht.discovery import LEFT, Advert
from hetpeer.dht.node.node import Node
from hetpeer.dht.node.own_line import machine_addresses
from hetpeer.peer.probing.kept_line import KeptLine, network_of
from hetpeer.peer.probing.peer_ping import ping_peer
from hetpeer.stages.planning.network_coordinates import Coordinate, OwnCoordinate

OFTEN_S, SELDOM_S = 5.0, 60.0
"""Seconds between two pings, until MANY were sent, and after that."""
MANY = 24
PING_BYTES = 8_000
"""Bytes of a ping at most, of which nearly all make the connection to a peer that we had none to."""
SHARE = 0.005
"""Largest part of the uplink that pings take."""
UNKNOWN_RATE = 125e3
"""Bytes/s of an uplink that is not known, for that."""
SAVE_S = 300.0


def pause_s(sent: int, uplink: float, *, metered: bool = False) -> float:
    """Seconds until the next ping after so many; `uplink` in bytes/s, 0: not known. Pure."""
    usual_s = SELDOM_S if metered or sent >= MANY else OFTEN_S
    return max(usual_s, PING_BYTES / (SHARE * (uplink or UNKNOWN_RATE)))


def partner(own: str, turn: int, met: Collection[str], adverts: Mapping[str, Advert]) -> str | None:
    """The peer to ping: every other time one that was not met yet; None if nobody else is there. Pure.

    Not each time: some never answer.
    """
    there = [p for p, a in adverts.items() if p != own and a.state != LEFT]
    new = [peer for peer in there if peer not in met]
    return min((new if turn % 2 == 0 else []) or there, key=lambda peer: _draw(own, turn, peer), default=None)


def coordinates_in(adverts: Mapping[str, Advert]) -> dict[str, Coordinate]:
    """Peer → the coordinate that it advertises, if that is one. Pure."""
    found = ((peer, Coordinate.of(advert.coordinate)) for peer, advert in adverts.items())
    return {peer: coordinate for peer, coordinate in found if coordinate is not None}


def kept_coordinate(peer: str, folder: Path) -> OwnCoordinate:
    """The coordinate of `peer` as its home `folder` has it, or one that knows nothing."""
    kept = KeptLine.load(folder)
    here = kept.coordinate_network == network_of(machine_addresses())
    return OwnCoordinate(peer, Coordinate.of(kept.coordinate) if here else None)


def keep_coordinate(own: OwnCoordinate, folder: Path) -> None:
    """Write it into the home `folder`, if it says anything."""
    if own.is_known:
        here = network_of(machine_addresses())
        kept = KeptLine.load(folder)
        kept.model_copy(update={"coordinate": own.numbers, "coordinate_network": here}).save(folder)


async def keep_moving(
    node: Node,
    own: OwnCoordinate,
    folder: Path,
    adverts: Callable[[], Mapping[str, Advert]],
    trips: Callable[[], Mapping[str, float]] = dict,
    uplink: Callable[[], float] = lambda: 0.0,
    *,
    metered: bool = False,
) -> None:
    """Ping, and move `own`, until cancelled; what is known then is kept in `folder`.

    `adverts`: those last read. `trips`: peer → best round trip of a link in use. `uplink`: bytes/s, 0: not
    known. `metered`: whether the owner pays for bytes, so that there are fewer pings.
    """
    loop, sent = asyncio.get_running_loop(), 0
    saved_at = loop.time()
    try:
        while True:
            there = adverts()
            if (peer := partner(node.peer_id, sent, own.met, there)) is not None:
                sent += 1
                if (answer := await ping_peer(node, peer)) is not None:
                    own.pinged(peer, *answer)
            for other, trip_s in trips().items():
                own.carried(other, trip_s)
            own.heard(coordinates_in(there))
            own.move()
            if loop.time() - saved_at >= SAVE_S:
                saved_at = loop.time()
                keep_coordinate(own, folder)
            await asyncio.sleep(pause_s(sent, uplink(), metered=metered))
    finally:
        keep_coordinate(own, folder)


def direct_trips(trips: Mapping[str, float], node: Node) -> dict[str, float]:
    """Those of `trips` that are known, and lead through no relay."""
    return {
        peer: trip_s
        for peer, trip_s in trips.items()
        if 0.0 < trip_s < math.inf and ((path := node.path(peer)) is None or not path.relay)
    }


def _draw(own: str, turn: int, peer: str) -> bytes:
    return hashlib.sha256(f"{own} {turn} {peer}".encode()).digest()
