"""A node's configuration, and the p2pd flags that follow from it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import Address, through
from hetpeer.dht.identity.peer_identity import Identity

_RELAY_SERVICE = (
    "-relayDataLimit=1125899906842624",
    "-relayTimeLimit=720h",
    "-relayMaxReservations=4096",
    "-relayMaxCircuits=256",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node's configuration: where it listens and which peers it knows."""

    host: str = "127.0.0.1"
    """IP address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 0
    """TCP port; 0 lets the system choose one, which is then kept for the node's life."""
    peers: tuple[Address, ...] = ()
    """Addresses to join by, dialled again whenever the connection is lost; our own is skipped."""
    alone_ok: bool = False
    """Whether to start if none of `peers` answers, as the first of several that know each other must."""
    reachability: Literal["auto", "ask", "public", "private"] = "auto"
    """How to find out whether others can reach us.

    auto: by libp2p, which takes its time. ask: other peers are asked to dial us, and p2pd is told the result.
    public: anybody can reach us, and we relay for others. private: we take no connections and use `relays`.
    """
    relays: tuple[Address, ...] = ()
    """Public peers to reserve a relay slot at, for private nodes. Two or more survive the loss of one."""
    announce: tuple[Address, ...] = ()
    """Addresses to tell others instead of where p2pd listens; for a private node, in addition to
    its relays.
    """

    direct_port: int | None = None
    """TCP port for streams past p2pd (tls_listener.py); 0 lets the system choose one, None: no
    such streams.
    """

    def __post_init__(self) -> None:
        """Check the fields. Raises `LocalError` HP-NET-005."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError as error:
            raise _unusable(
                f"{self.host!r} is not an IP address",
                "it has to be a number like 192.0.2.7",
                "use 0.0.0.0 to listen on all of them",
            ) from error
        if not 0 <= self.port < 2**16:
            raise _unusable(
                f"cannot use port {self.port}", "ports are 0 to 65535", "use 0 to let the system choose"
            )
        if self.reachability == "private" and not self.relays:
            raise _unusable(
                "a private node needs a relay",
                "nobody could reach it",
                "name at least one public peer as relay",
            )


def p2pd_arguments(config: NodeConfig, identity: Identity, port: int, folder: Path) -> list[str]:
    """The flags of a p2pd that listens on `port` and takes requests at a socket in `folder`."""
    ip = ipaddress.ip_address(config.host)
    arguments = [
        f"-listen=/unix{folder / 'p2pd.sock'}",
        f"-hostAddrs=/ip{ip.version}/{ip}/tcp/{port}",
        f"-id={identity.path}",
        "-b=0",  # first_contact.py connects to the peers
        "-dhtServer=1",
        "-tls=1",
        "-autonat=1",
        "-connManager=1",
        "-idleTimeout=30s",
        "-relay=1",
        f"-natPortMap={int(not ip.is_loopback)}",
    ]
    announced = [address.transport for address in config.announce]
    if config.reachability == "public":
        arguments += ["-forceReachabilityPublic=1", *_RELAY_SERVICE]
    if config.reachability == "private":
        # No autorelay: relay_slots.py reserves faster, and knows what it got.
        announced += [through(relay, identity.peer_id).transport for relay in config.relays]
        arguments.append("-forceReachabilityPrivate=1")
    if announced:
        arguments.append(f"-announceAddrs={','.join(announced)}")
    return arguments


def _unusable(what: str, why: str, fix: str) -> LocalError:
    return LocalError("HP-NET-005", what, why=why, fix=fix, exit_code=ExitCode.USAGE)
