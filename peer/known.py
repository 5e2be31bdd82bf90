"""The addresses by which this machine joined last, kept in its home."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from hetpeer.bootstrap.files import atomic_write
from hetpeer.dht.addresses import Address
from hetpeer.dht.errors import ExitCode, LocalError

FILE = "addresses.json"


def remember(home: Path, addresses: Iterable[Address]) -> None:
    """Keep the addresses that worked, for `hetpeer status` and the next join."""
    atomic_write(home / FILE, json.dumps([str(address) for address in addresses]).encode())


def remembered(home: Path) -> tuple[str, ...]:
    """Those of the last time; none if there was none, or if the file is not sound."""
    try:
        addresses = json.loads((home / FILE).read_bytes())
    except (OSError, ValueError):
        return ()
    return tuple(map(str, addresses)) if isinstance(addresses, list) else ()


def known_addresses(home: Path) -> tuple[str, ...]:
    """The addresses by which this machine joined last. Raises `LocalError` HP-ADDR-002 if it never did."""
    addresses = remembered(home)
    if not addresses:
        raise LocalError(
            "HP-ADDR-002",
            "no peer to ask is known",
            why=f"nobody has joined a run from {home} yet",
            fix="say whom to ask: hetpeer status --bootstrap ADDR",
            exit_code=ExitCode.USAGE,
        )
    return addresses
