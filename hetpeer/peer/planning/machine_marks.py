"""Volunteers that share a processor or a line, by their adverts. Pure.

A processor is shared by those whose adverts have the same mark of it; a line by those behind one public
address, or with one processor. Adverts are claims: whoever copies another's mark makes the planner expect
less of both, and the run slower.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hetpeer.dht.discovery import Advert
from hetpeer.dht.identity.addresses import relay_in

HOME_BITS = {4: 32, 6: 64}
"""Prefix bits of the addresses of one home."""


def sharing_fields(adverts: Mapping[str, Advert]) -> dict[str, dict[str, Any]]:
    """Peer → entries of a `[[device]]` on what it shares with another one; none if it shares nothing."""
    processors = _groups(adverts, lambda advert: advert.processor)
    lines = _groups(adverts, _line)
    found: dict[str, dict[str, Any]] = {peer: {} for peer in adverts}
    for peer, number in processors.items():
        found[peer] |= {"processor": number, "processor_part": _part(adverts[peer])}
    for peer, number in lines.items():
        found[peer] |= {"line": number}
    return found


def slowed(adverts: Mapping[str, Advert], peer: str) -> float:
    """Factor by which others at its processor slowed the worker of `peer` down while it was measured.

    They computed for a share of the time. If all together take more than the processor has while `peer`
    computes, each gets less in proportion.
    """
    own = adverts[peer]
    if not own.processor:
        return 1.0
    beside = sum(
        advert.computes * _part(advert)
        for other, advert in adverts.items()
        if other != peer and advert.processor == own.processor
    )
    return max(1.0, _part(own) + beside)


def _part(advert: Advert) -> float:
    """Fraction of its processor that it takes; all of it if it does not say."""
    return advert.processor_part or 1.0


def _groups(adverts: Mapping[str, Advert], mark: Callable[[Advert], str]) -> dict[str, int]:
    """Peer → number, from 1, of the mark that it has in common with another one."""
    marks = {peer: mark(advert) for peer, advert in adverts.items()}
    shared = [one for one in dict.fromkeys(marks.values()) if one and _often(one, marks.values())]
    return {peer: 1 + shared.index(one) for peer, one in marks.items() if one in shared}


def _often(one: str, marks: Iterable[str]) -> bool:
    return sum(mark == one for mark in marks) > 1


def _line(advert: Advert) -> str:
    """The home of its first public address; else its processor, so that one machine is one line."""
    for text in advert.addresses:
        parts = text.split("/")
        if relay_in(text) or len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
            continue
        try:
            address = ipaddress.ip_address(parts[2])
        except ValueError:
            continue
        if address.is_global:
            return str(ipaddress.ip_network((address, HOME_BITS[address.version]), strict=False))
    return advert.processor
