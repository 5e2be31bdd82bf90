"""Addresses that people type and peers advertise: `/ip4/1.2.3.4/tcp/31330/p2p/Qm…`.

py-multiaddr parses and checks all of them; the rest of the project sees only `Address`. hivemind carries a
second, vendored Multiaddr class; the conversion into it is here and nowhere else. Both libraries are imported
on first use, so that the command line can check an address without loading torch.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.base.errors import ExitCode, LocalError

EXAMPLE = "/ip4/203.0.113.7/tcp/31330/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
MAX_ADDRESS_LENGTH = 512
PEER_IDS = ("Qm", "12D3KooW")
"""Beginnings of the ids of RSA keys, which all of hetpeer's peers have, and of Ed25519 keys, which hivemind's
own programs have unless they are given a key file.
"""
_CUSTOMER = {"ip4": 24, "ip6": 48}
"""Prefix bits that all addresses of one customer share."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a peer, and the id of the peer that must answer there. `text` ends in `/p2p/<peer_id>`."""

    text: str
    peer_id: str

    def __str__(self) -> str:
        return self.text

    @property
    def transport(self) -> str:
        """The address without its last `/p2p/` part: what to dial."""
        return self.text.removesuffix(f"/p2p/{self.peer_id}")

    @property
    def relay(self) -> str:
        """Peer id of the relay that the address leads through; empty for a direct address."""
        return relay_in(self.transport)

    @property
    def socket(self) -> tuple[str, int] | None:
        """(IP address, TCP port) to dial; None for other transports. For a circuit, those of its relay."""
        return socket_in(self.text)

    def transport_bytes(self) -> bytes:
        """`transport` in libp2p's binary form, as p2pd takes it."""
        from multiaddr import Multiaddr

        return bytes(Multiaddr(self.transport).to_bytes())


def parse_address(text: str) -> Address:
    """Check an address that a person typed. Raises `LocalError` HP-ADDR-001 with the reason."""
    if len(text) > MAX_ADDRESS_LENGTH:
        raise _unusable(text, f"it is longer than {MAX_ADDRESS_LENGTH} characters")
    if not text.strip().startswith("/"):
        raise _unusable(text, "it does not begin with /, as in /ip4/")
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error

    try:
        parsed = Multiaddr(text.strip())
        parts = [(protocol.name, value) for protocol, value in parsed.items()]
    except (Error, ValueError, LookupError, TypeError) as error:
        raise _unusable(text, _reason(error)) from error
    _check_parts(text, parts)
    spelt = str(parsed)
    if len(spelt) > MAX_ADDRESS_LENGTH:  # escapes make the text longer
        raise _unusable(text, f"it is longer than {MAX_ADDRESS_LENGTH} characters")
    return Address(text=spelt, peer_id=str(parts[-1][1]))


def address_from_bytes(raw: bytes, peer_id: str) -> Address | None:
    """`Address` from p2pd's binary address, with or without `peer_id` in it; None if it cannot be dialled."""
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error

    try:
        transport = str(Multiaddr(raw)).removesuffix(f"/p2p/{peer_id}")
        return parse_address(f"{transport}/p2p/{peer_id}")
    except (Error, ValueError, LookupError, LocalError):
        return None


@functools.lru_cache(maxsize=1024)
def text_of(raw: bytes) -> str:
    """A binary address as text; empty if it is invalid."""
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error

    try:
        return str(Multiaddr(raw)) if raw else ""
    except (Error, ValueError, LookupError):
        return ""


def relay_in(text: str) -> str:
    """Peer id of the relay in an address; empty for a direct one."""
    before, circuit, _ = text.partition("/p2p-circuit")
    return before.rpartition("/p2p/")[2] if circuit else ""


def socket_in(text: str) -> tuple[str, int] | None:
    """(IP address, TCP port) at the beginning of an address; None for other transports."""
    parts = text.split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp" or not parts[4].isdecimal():
        return None
    return parts[2], int(parts[4])


def network_in(text: str) -> str:
    """Network in an address: IPv4 /24, IPv6 /48 (one customer's share), or the relay's id; empty: none."""
    if relay := relay_in(text):
        return relay
    parts = text.split("/")
    if len(parts) < 3 or parts[1] not in _CUSTOMER:
        return ""
    try:
        return str(ipaddress.ip_network(f"{parts[2]}/{_CUSTOMER[parts[1]]}", strict=False))
    except ValueError:
        return ""


def customer_in(text: str) -> str:
    """`network_in(text)` if it is on the internet or a relay; empty for networks of a house or machine."""
    network = network_in(text)
    return network if "/" not in network or ipaddress.ip_network(network).is_global else ""


def is_far(address: Address) -> bool:
    """Whether the address is on the internet, not in a local network or on this machine."""
    place = address.socket
    return place is not None and ipaddress.ip_address(place[0]).is_global


def far_first(addresses: Iterable[Address]) -> list[Address]:
    """The direct addresses with a socket, those on the internet first."""
    direct = [address for address in addresses if address.socket is not None and not address.relay]
    return sorted(direct, key=lambda address: not is_far(address))


def at_socket(ip: str, port: int, peer_id: str) -> Address:
    """The address of a peer that listens at `ip` and `port`. Raises `LocalError` HP-ADDR-001."""
    return parse_address(f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}/p2p/{peer_id}")


def through(relay: Address, peer_id: str) -> Address:
    """The address of `peer_id` through a relay."""
    return Address(text=f"{relay}/p2p-circuit/p2p/{peer_id}", peer_id=peer_id)


def hivemind_unix_address(path: str) -> Any:
    """A unix socket's path as hivemind's Multiaddr."""
    from hivemind.utils.multiaddr import Multiaddr

    return Multiaddr(f"/unix{path}")


def _check_parts(text: str, parts: list[tuple[str, Any]]) -> None:
    """Refuse an address without a port, or without a peer id that can be proved."""
    names = [name for name, _ in parts]
    if not names or names[-1] != "p2p":
        raise _unusable(
            text, "it does not end in /p2p/ and the peer's id, so nobody could prove to be that peer"
        )
    if not str(parts[-1][1]).startswith(PEER_IDS):
        raise _unusable(text, "the peer id after /p2p/ begins with neither Qm nor 12D3KooW")
    if "tcp" not in names and "quic-v1" not in names:
        raise _unusable(text, "it names no port: /tcp/31330 or /udp/31330/quic-v1 is missing")
    if any(name in {"tcp", "udp"} and int(value) == 0 for name, value in parts):
        raise _unusable(text, "port 0 cannot be dialled")


def _unusable(text: str, why: str) -> LocalError:
    return LocalError(
        "HP-ADDR-001",
        f"{text[:MAX_ADDRESS_LENGTH]!r} is not an address of a peer",
        why=why,
        fix=f"copy the whole address that the other peer prints, like {EXAMPLE}",
        exit_code=ExitCode.USAGE,
    )


def _reason(error: Exception) -> str:
    """py-multiaddr's message without the address that it repeats."""
    return str(getattr(error, "message", "") or error).split(" (string:")[0] or "it cannot be parsed"
