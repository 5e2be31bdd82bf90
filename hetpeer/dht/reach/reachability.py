"""Can others open connections to us, and by which path do we reach them? Pure.

Two peers at a time are asked to dial us back (dialback.py); docs/nat.md has the states and the reasons. Times
are seconds of one monotonic clock. The driver (dialback.py) carries out the effects and reports the
results. `PeerPaths` is fed with p2pd's list of connections.
"""

from __future__ import annotations

import enum
import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hetpeer.dht.identity.addresses import relay_in

HELPERS = 2
"""Helpers asked in one round."""
ROUND_S = 7.0
"""Seconds after which a round is judged without the missing answers."""
RETRY_S = 30.0
"""Seconds until the next round while nothing is known."""
CONFIRM_S = 15.0
"""Seconds until the second round that must agree before an earlier result is given up."""
RECHECK_S = 600.0


class ReachKind(enum.StrEnum):
    """Whether others can connect to us."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachFinding:
    """One helper's finding: our IP address, and the port at which it reached us (0: none)."""

    helper: str
    ip: str
    port: int

    @property
    def is_global(self) -> bool:
        """Whether the observer saw us from outside our own network."""
        return ipaddress.ip_address(self.ip).is_global


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachEstimate:
    """The result of a round, and how many helpers agree on it."""

    reach: ReachKind = ReachKind.UNKNOWN
    peers: int = 0
    ip: str = ""
    """Our address as they see it."""
    port: int = 0
    """The port at which they reached us."""
    outside: bool = False
    """Whether those peers saw us from outside our own network."""
    alike: int = 0
    """Number of those peers that agree on this address and port."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Effect: ask this peer to dial us."""

    helper: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Effect: report the new estimate."""

    estimate: ReachEstimate


Effect = Ask | Settle


def judge(findings: Collection[ReachFinding]) -> ReachEstimate:
    """The estimate from `findings`, by majority; those from outside our network outweigh neighbours'."""
    outside = [finding for finding in findings if finding.is_global]
    counted = outside or list(findings)
    reached = [finding for finding in counted if finding.port]
    missed = [finding for finding in counted if not finding.port]
    if not counted:
        return ReachEstimate()
    public = len(reached) > len(missed)
    agreeing = reached if public else missed
    seen = Counter((finding.ip, finding.port) for finding in agreeing)
    ((ip, port), alike) = seen.most_common(1)[0]
    return ReachEstimate(
        reach=ReachKind.PUBLIC if public else ReachKind.PRIVATE,
        peers=len(agreeing),
        ip=ip,
        port=port,
        outside=bool(outside),
        alike=alike,
    )


class Reachability:
    """The core. Each event returns the effects that follow from it, in order."""

    def __init__(self, now: float) -> None:
        self.estimate = ReachEstimate()
        self._due = now
        self._deadline = now
        self._concluded = now
        self._helpers: tuple[str, ...] = ()
        self._asked: set[str] = set()
        """Helpers asked since everybody had a turn."""
        self._awaited: set[str] = set()
        self._findings: list[ReachFinding] = []
        self._doubted: ReachKind | None = None
        self._addresses: frozenset[str] | None = None

    def met(self, now: float, helpers: Sequence[str]) -> list[Effect]:
        """Directly connected peers that could be asked, in the order of preference."""
        self._helpers = tuple(helpers)
        return self._fill(now) if self._findings or self._awaited else self.tick(now)

    def moved(self, now: float, addresses: Collection[str]) -> list[Effect]:
        """The present addresses of this machine; a change means another network."""
        before, self._addresses = self._addresses, frozenset(addresses)
        if before is not None and before != self._addresses:
            self.doubted(now)
        return self.tick(now)

    def doubted(self, now: float) -> None:
        """We may be somewhere else now: the next round is due, and everybody may be asked again."""
        self._due = now
        self._asked.clear()

    def unserved(self, now: float) -> list[Effect]:
        """No relay has a slot for us: ask again, since helpers name relays too."""
        self._due = min(self._due, self._concluded + RETRY_S)
        return self.tick(now)

    def answered(self, now: float, helper: str, finding: ReachFinding | None) -> list[Effect]:
        """A helper's finding; None if it found out nothing."""
        if helper not in self._awaited:
            return []
        self._awaited.discard(helper)
        if finding is not None:
            self._findings.append(finding)
        effects = self._fill(now)
        return effects if self._awaited else self._conclude(now)

    def tick(self, now: float) -> list[Effect]:
        """Time passes: begin a round, or end one that is late."""
        if self._awaited:
            return self._conclude(now) if now >= self._deadline else []
        if now < self._due:
            return []
        self._findings.clear()
        if all(helper in self._asked for helper in self._helpers):
            self._asked.clear()  # everybody had a turn
        effects = self._fill(now)
        if self._helpers and not effects:
            self._due = now + RETRY_S
        return effects

    def _fill(self, now: float) -> list[Effect]:
        """Ask as many helpers as are missing, new ones first. Neighbours alone are not enough."""
        outside = any(finding.is_global for finding in self._findings)
        wanting = HELPERS * (1 if outside else 2) if self._findings else HELPERS
        wanting -= len(self._findings) + len(self._awaited)
        fresh = [helper for helper in self._helpers if helper not in self._asked][: max(wanting, 0)]
        if fresh and not self._awaited:
            self._deadline = now + ROUND_S
        self._asked.update(fresh)
        self._awaited.update(fresh)
        return [Ask(helper) for helper in fresh]

    def _conclude(self, now: float) -> list[Effect]:
        """Settle on the findings; one that contradicts the estimate must be found twice."""
        self._awaited.clear()
        self._concluded = now
        found, known = judge(self._findings), self.estimate
        self._due = now + (RETRY_S if found.reach is ReachKind.UNKNOWN else RECHECK_S)
        if found.reach is ReachKind.UNKNOWN:
            return []
        contrary = known.reach not in (ReachKind.UNKNOWN, found.reach)
        if contrary and self._doubted is not found.reach:
            self._doubted = found.reach
            self._asked.clear()
            self._due = now + CONFIRM_S
            return []
        self._doubted = None
        if found == known:
            return []
        self.estimate = found
        return [Settle(found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPath:
    """The best connection to a peer. `relay` is the id of the relay, empty for a direct one."""

    relay: str = ""
    why: str = ""
    """Reason why the last attempt to reach the peer without the relay failed: `no answer` of its port, or
    `no address` that it names; empty: there was none yet.
    """

    def __str__(self) -> str:
        because = f": {self.why}" if self.why else ""
        return f"through {self.relay[-8:]}{because}" if self.relay else "direct"


class PeerPaths:
    """The paths to all connected peers."""

    def __init__(self) -> None:
        self._paths: dict[str, PeerPath] = {}
        self._why: dict[str, str] = {}
        """Relayed peer → reason."""

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

    def explain(self, peer_id: str, why: str) -> None:
        """Note why `peer_id` is reached through a relay still."""
        self._why[peer_id] = why

    def update(self, connections: Iterable[tuple[str, str]]) -> list[str]:
        """Take in all (peer id, remote address) of now; return peers that turned from relayed to direct."""
        relays: dict[str, str] = {}
        for peer, address in connections:
            relay = relay_in(address)
            relays[peer] = relay and relays.get(peer, relay)
        self._why = {peer: why for peer, why in self._why.items() if relays.get(peer)}
        before = self._paths
        self._paths = {
            peer: PeerPath(relay=relay, why=self._why.get(peer, "")) for peer, relay in relays.items()
        }
        return [peer for peer, path in before.items() if path.relay and relays.get(peer) == ""]
