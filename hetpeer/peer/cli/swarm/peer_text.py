"""Peers in plain words: their work, machines, lines, ways to them, and how steady they are. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetpeer.dht.base.errors import short_id
from hetpeer.peer.limits.amounts import bytes_text, mbit_text

if TYPE_CHECKING:
    from hetpeer.peer.watching.swarm_status import PeerRow, SwarmStatus

FASTEST = 1.25e10
"""Bytes/s (100 Gbit/s) beyond which a measured speed is no true figure: its frames took no time."""
WORTH_TELLING = 0.05
"""Share of its time that a worker waits: less is not shown."""


def work_cells(row: PeerRow, found: SwarmStatus, blocks: str) -> list[str]:
    """Role, name, state, blocks, step, speed, load of the worker."""
    speed = f"{row.tokens_per_second:,.0f} {found.run.unit}/s" if row.tokens_per_second else ""
    return [row.role, row.name, row.state, blocks, f"step {row.step}", speed, _busy(row)]


def machine_cells(row: PeerRow, names: Mapping[str, str]) -> list[str]:
    """Device, memory, line, way to the peer, steadiness; `names` as `names_of` gives them."""
    return [row.device, _memory(row), _line(row), _reached(row, names), _steady(row)]


def _steady(row: PeerRow) -> str:
    """Time that a peer has been there, and how often it went: `here 2h 07m, left 3 times`."""
    here = [f"here {duration(row.up_s)}"] if row.up_s else []
    if row.role == "volunteer" and row.departures is not None:
        often = {0: "never left", 1: "left once"}
        here.append(often.get(row.departures, f"left {row.departures} times"))
    return ", ".join(here)


def _memory(row: PeerRow) -> str:
    """Memory that a peer offers: `21 GiB GPU, 14 GiB RAM`; empty while it is unknown."""
    kinds = ((row.gpu_bytes, "GPU"), (row.ram_bytes, "RAM"))
    return ", ".join(f"{bytes_text(nbytes)} {kind}" for nbytes, kind in kinds if nbytes)


def _line(row: PeerRow) -> str:
    """Line of a peer: `20.0 Mbit/s up, 100.0 Mbit/s down`; empty while it is unknown."""
    ways = ((row.uplink, "up"), (row.downlink, "down"))
    return ", ".join(f"{speed_text(rate)} {way}" for rate, way in ways if rate)


def _busy(row: PeerRow) -> str:
    """Share of the time that a worker computes, and what it mostly waits for: `61%, 30% waiting for data`."""
    if not row.computes:
        return ""
    rest = max(1.0 - row.computes - row.waits_data - row.waits_room, 0.0)
    waits, what = max((row.waits_data, "data"), (row.waits_room, "memory"), (rest, "the next step"))
    return f"{row.computes:.0%}" + (f", {waits:.0%} waiting for {what}" if waits >= WORTH_TELLING else "")


def _reached(row: PeerRow, names: Mapping[str, str]) -> str:
    """Way by which other peers reach `row`'s peer; empty while it is unknown."""
    if row.reach == "private":
        ways = ", ".join(name_at(relay, names) for relay in row.relays)
        return f"through {ways}" if ways else "by nobody"
    return "directly" if row.reach == "public" else ""


def names_of(found: SwarmStatus) -> dict[str, str]:
    """Last eight characters of each peer's id, as in adverts → its name."""
    return {row.peer[-8:]: name_of(row) for row in found.peers}


def name_at(end: str, names: Mapping[str, str]) -> str:
    """Name of the peer whose id ends in `end`."""
    return names.get(end, short_id(end))


def name_of(row: PeerRow) -> str:
    return row.name or short_id(row.peer)


def duration(seconds: float) -> str:
    """`45s`, `3m 05s`, `2h 07m`, `4d 02h`."""
    whole = round(seconds)
    for unit, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller_size:02}{smaller}"
    return f"{whole}s"


def speed_text(bytes_per_second: float) -> str:
    """Speed of a link: `94.2 Mbit/s`."""
    if bytes_per_second > FASTEST:
        return "too fast to measure"
    return mbit_text(bytes_per_second)
