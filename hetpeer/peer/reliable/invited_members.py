"""Choice of the members whose addresses an invite carries, besides those of the peer that makes it. Pure.

An old invite works as long as one of its peers can be reached, also when the reliable peer is somewhere else.
The choice is sticky: an invite lies in chats and on web pages, and each change of it would be one more link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from hetpeer.dht.identity.addresses import Address, is_far

MAX_MEMBERS = 3
STALE_S = 900.0
"""Seconds without a member after which another one takes its place."""


@dataclass(slots=True)
class _Carried:
    address: Address
    seen_at: float


class InvitedMembers:
    """Members in an invite; at first those `carried` by the invite before, at `now` in seconds."""

    def __init__(self, carried: Iterable[Address], now: float) -> None:
        self._carried = {address.peer_id: _Carried(address, now) for address in carried}
        while len(self._carried) > MAX_MEMBERS:
            self._carried.popitem()

    @property
    def addresses(self) -> list[Address]:
        """One address of each, those first that were taken first."""
        return [member.address for member in self._carried.values()]

    def candidates(self, places: Mapping[str, Address], now: float) -> dict[str, Address]:
        """Member → address, of `places`, that is worth proving: carried ones, and others if there is room."""
        room = MAX_MEMBERS - len(self._carried) + len(self._stale(now))
        fresh = [peer for peer in places if peer not in self._carried][: 2 * room]
        return {peer: places[peer] for peer in (*self._carried, *fresh) if peer in places}

    def proved(self, places: Mapping[str, Address], now: float) -> None:
        """Members answered at `places`: carried ones stay, others take what is free or stale."""
        for peer, address in places.items():
            if peer in self._carried:
                self._carried[peer] = _Carried(address, now)
                continue
            if len(self._carried) >= MAX_MEMBERS:
                stale = self._stale(now)
                if not stale:
                    continue
                del self._carried[stale[0]]
            self._carried[peer] = _Carried(address, now)

    def _stale(self, now: float) -> list[str]:
        return [peer for peer, member in self._carried.items() if now - member.seen_at >= STALE_S]


def is_as_public(own: Collection[Address], address: Address) -> bool:
    """Whether everybody who can dial one of our `own` addresses can dial `address`, too.

    An invite for the internet carries no addresses of a house, and only one for this machine alone carries
    loopback ones.
    """
    return _reach(address) >= max(map(_reach, own), default=0)


def _reach(address: Address) -> int:
    """2: on the internet; 1: in a local network; 0: on this machine."""
    place = address.socket
    return 2 if is_far(address) else int(place is not None and not ip_address(place[0]).is_loopback)
