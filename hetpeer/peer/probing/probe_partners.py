"""Choice of the peers that are probed, and of the bytes for it. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.discovery import LEFT, Advert
from hetpeer.dht.identity.addresses import is_far, parse_address
from hetpeer.dht.reach.reachability import ReachKind

RELIABLE, VOLUNTEERS = 3, 2
"""Peers of each kind that are probed at most."""
METERED = 4
"""A metered line is probed with 1/METERED of the bytes, and"""
CAP_SHARE = 1000
"""with no more than 1/CAP_SHARE of what the month's cap leaves."""


def partners(own: str, reliable: Iterable[str], adverts: Mapping[str, Advert]) -> list[str]:
    """Peers to probe: reliable ones, then volunteers that take connections.

    If any of them is on the internet, only those are: a neighbour in the same house says nothing of the line
    to the internet. Whom of many is another choice for each `own`, so that nobody is everybody's.
    """
    open_to_us = [
        peer
        for peer, advert in adverts.items()
        if advert.role == "volunteer" and advert.state != LEFT and advert.reach != ReachKind.PRIVATE
    ]
    kinds = [(set(reliable) - {own}, RELIABLE), (set(open_to_us) - {own}, VOLUNTEERS)]
    far = {peer for peer, advert in adverts.items() if _far(advert)}
    if any(far & peers for peers, _ in kinds):
        # A reliable peer may have no advert yet: where it is is unknown, so it stays.
        kinds = [(peers & far | (peers - adverts.keys()), most) for peers, most in kinds]
    return [peer for peers, most in kinds for peer in sorted(peers, key=lambda peer: _draw(own, peer))[:most]]


def probe_bytes(most: int, cap: float, used: float) -> int:
    """Bytes of a probe: `most`, or less on a line with a monthly `cap` (infinite: none) of which `used` are
    used.
    """
    if math.isinf(cap):
        return most
    return max(min(most // METERED, int((cap - used) / CAP_SHARE)), 0)


def _far(advert: Advert) -> bool:
    """Whether any of its addresses is one of the internet."""
    return any(_is_far(text) for text in advert.addresses)


def _is_far(text: str) -> bool:
    try:
        return is_far(parse_address(text))
    except LocalError:
        return False


def _draw(own: str, peer: str) -> bytes:
    return hashlib.sha256(f"{own} {peer}".encode()).digest()
