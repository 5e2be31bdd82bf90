"""The path to each peer: direct, or through a relay. Pure; fed with p2pd's list of connections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetpeer.dht.identity.addresses import relay_in


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPath:
    """The best connection to a peer. `relay` is the id of the relay, empty for a direct one."""

    relay: str = ""

    def __str__(self) -> str:
        return f"through {self.relay[-8:]}" if self.relay else "direct"


class PeerPaths:
    """The paths to all connected peers."""

    def __init__(self) -> None:
        self._paths: dict[str, PeerPath] = {}

    def of(self, peer_id: str) -> PeerPath | None:
        """The path to a peer; None if there is no connection."""
        return self._paths.get(peer_id)

    def through(self, relay: str) -> list[str]:
        """The peers that are reached through `relay`."""
        return [peer for peer, path in self._paths.items() if path.relay == relay]

    @property
    def relayed(self) -> list[str]:
        """The peers that are reached through any relay."""
        return [peer for peer, path in self._paths.items() if path.relay]

    @property
    def direct(self) -> list[str]:
        """The peers that are reached without a relay."""
        return [peer for peer, path in self._paths.items() if not path.relay]

    def update(self, connections: Iterable[tuple[str, str]]) -> list[str]:
        """Take in all (peer id, remote address) of now; returns the peers that turned from
        relayed to direct.
        """
        relays: dict[str, str] = {}
        for peer, address in connections:
            relay = relay_in(address)
            relays[peer] = relay and relays.get(peer, relay)
        before, self._paths = self._paths, {peer: PeerPath(relay=relay) for peer, relay in relays.items()}
        return [peer for peer, path in before.items() if path.relay and relays.get(peer) == ""]
