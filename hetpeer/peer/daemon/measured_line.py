"""The line of a volunteer, known before its first place: as it was kept, or probed anew (docs/joining.md)."""

from __future__ import annotations

import asyncio
import logging
import time

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.node.own_line import machine_addresses
from hetpeer.peer.daemon.limits_in_force import LimitsInForce
from hetpeer.peer.daemon.presence import Presence
from hetpeer.peer.limits.amounts import bytes_text, mbit_text, volume
from hetpeer.peer.probing.kept_line import KeptLine, network_of
from hetpeer.peer.probing.line_probe import BYTES, probe_line
from hetpeer.peer.probing.probe_partners import partners, probe_bytes
from hetpeer.peer.process.console import say
from hetpeer.peer.process.home import Home

ROSTER_S = 3.0
"""Seconds to find out who else is there."""

_log = logging.getLogger(__name__)


async def measured_line(presence: Presence, governing: LimitsInForce) -> KeptLine:
    """The line as it is kept if that is fresh, else after a probe. Never raises for what a peer does."""
    kept, network = KeptLine.load(presence.home.path), network_of(machine_addresses())
    if kept.is_fresh(time.time(), network):
        return kept
    cap = volume(governing.settings.limits.transfer_cap)
    nbytes = probe_bytes(BYTES, cap, governing.month_bytes)
    if not nbytes:
        return kept
    found = await probe_line(presence.node, await _partners(presence), nbytes)
    for peer, coordinate in found.coordinates.items():
        presence.coordinate.pinged(peer, found.trips[peer], coordinate)
    presence.coordinate.move()
    line = kept.probed(found, time.time(), network)
    line.save(presence.home.path)
    say(line_text(line, found.nbytes))
    _log.info("a probe of %.1f s found %s", found.seconds, found)
    return line


async def _partners(presence: Presence) -> list[str]:
    """Peers to probe; without an answer from the DHT the reliable ones alone."""
    adverts = {}
    try:
        async with asyncio.timeout(ROSTER_S):
            adverts = await presence.roster.read()
    except (RemoteError, TimeoutError) as error:
        _log.debug("nobody says who is there: %s", error)
    return partners(presence.node.peer_id, presence.files.membership_config.peers, adverts)


def keep_traffic(home: Home, uplink: float) -> None:
    """Keep the uplink in bytes/s that traffic has shown for the next life; 0: it showed none."""
    kept = KeptLine.load(home.path)
    seen = kept.seen(uplink, time.time())
    if seen != kept:
        seen.save(home.path)


def line_text(line: KeptLine, nbytes: int) -> str:
    """Line for the owner, after a probe with `nbytes`. Pure."""
    ways = ((line.uplink, line.uplink_error, "up"), (line.downlink, line.downlink_error, "down"))
    known = [f"{mbit_text(rate)} {way} (± {error:.0%})" for rate, error, way in ways if rate]
    if not known:
        return "the line could not be measured before work begins; traffic will show it"
    trip = f", {1e3 * line.trip_s:.0f} ms to the nearest peer and back" if line.trip_s else ""
    return f"measured the line with {bytes_text(nbytes)}: {', '.join(known)}{trip}"
