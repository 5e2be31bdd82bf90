"""Notices of runs in the local network: their making, and the check of others' notices. Pure.

Anybody in the network can send anything. A notice must be bounded and printable, and it only tells where to
ask: the run's manifest proves which run it is (peer/arrival/manifest_fetch.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import printable
from hetpeer.dht.identity.addresses import Address, is_far, parse_address
from hetpeer.peer.arrival.destinations import (
    MAX_ADDRESSES,
    RUN_ID,
    Destination,
    is_loopback,
    listed_runs,
    several_runs,
)

SERVICE = "_hetpeer._tcp.local."
VERSION = "1"
PLACES = ("address", "address-2", "address-3")
MAX_TEXT = 255
"""Bytes of one entry, `key=value`: DNS has one byte for its length."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A peer is in the run `run` (its id) and listens there. `name` is for people."""

    run: str
    name: str
    addresses: tuple[Address, ...]


def notice(run: str, name: str, own: Iterable[Address]) -> Notice | None:
    """Notice with a peer's `own` addresses, local ones first; loopback if no others; None without any."""
    direct = [place for place in own if place.socket is not None and not place.relay]
    beyond = [place for place in direct if place.socket is not None and not is_loopback(place.socket[0])]
    places = sorted(beyond or direct, key=is_far)[: len(PLACES)]
    return Notice(run, str(printable(name)), tuple(places)) if places else None


def told(said: Notice) -> dict[str, str]:
    """Entries of a TXT record."""
    places = dict(zip(PLACES, map(str, said.addresses), strict=False))
    entries = {"v": VERSION, "run": said.run, "name": said.name, **places}
    return {key: text for key, text in entries.items() if len(f"{key}={text}") <= MAX_TEXT}


def understood(entries: Mapping[bytes, bytes | None]) -> Notice | None:
    """The notice in the entries of a TXT record; None if it is invalid or useless. Never raises."""
    run, name = _text(entries, "run"), printable(_text(entries, "name"))
    if _text(entries, "v") != VERSION or not RUN_ID.fullmatch(run):
        return None
    places = tuple(place for key in PLACES if (place := _place(_text(entries, key))) is not None)
    return Notice(run, str(name), places) if places else None


def chosen(heard: Iterable[Notice], run: str = "") -> Destination:
    """Destination: the only run heard of, or `run` (an id), with as many addresses as an invite has.

    Raises `LocalError` HP-NET-016 (no notice), HP-ADDR-004 (several runs).
    """
    runs: dict[str, list[Notice]] = {}
    for one in heard:
        runs.setdefault(one.run, []).append(one)
    names = {one: peers[0].name for one, peers in runs.items()}
    if run and run not in runs:
        others = f"; there are {listed_runs(names)}" if runs else ""
        raise nobody_nearby(f"no peer there is in run {run}{others}")
    if not runs:
        raise nobody_nearby("no peer answered there")
    if not run and len(runs) > 1:
        raise several_runs("the local network", names, "hetpeer join --lan --run ID")
    (found,) = (run,) if run else runs
    turns = zip_longest(*(one.addresses for one in runs[found]))  # everybody's first one before any second
    places = dict.fromkeys(place for turn in turns for place in turn if place is not None)
    return Destination(tuple(places)[:MAX_ADDRESSES], found)


def nobody_nearby(why: str) -> LocalError:
    """HP-NET-016: the local network leads to no run."""
    return LocalError(
        "HP-NET-016",
        "no run is found in the local network",
        why=why,
        fix="start a peer of the run with --lan as well, or give hetpeer join an invite",
        exit_code=ExitCode.NETWORK,
    )


def _text(entries: Mapping[bytes, bytes | None], key: str) -> str:
    value = entries.get(key.encode()) or b""
    return value.decode("ascii", "replace") if len(value) <= MAX_TEXT else ""


def _place(text: str) -> Address | None:
    """An address to dial at once; None for a DNS name, which a foreign server would resolve, and a relay."""
    try:
        place = parse_address(text)
    except LocalError:
        return None
    return place if place.socket is not None and not place.relay else None
