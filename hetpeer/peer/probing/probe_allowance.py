"""Bytes that a peer gives away for others' probes, so that nobody drains it: by peer, network and hour. Pure.

Identities are cheap. So what counts is the total of an hour, and one network may take a part of it only. What
was granted and not used is given back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MEGA = 1_000_000
PERIOD_S = 3600.0
PER_PEER = 32 * MEGA
"""Bytes of one peer in PERIOD_S, both directions together: two whole probes and two measurements."""
NETWORK_SHARE = 4
"""One network may take 1/NETWORK_SHARE of the total."""


@dataclass(slots=True)
class Grant:
    """Bytes granted to `peer` of `network` (empty: none of the internet) at `at`, in seconds."""

    peer: str
    network: str
    nbytes: int
    at: float


class ProbeAllowance:
    """Allowance of `total` bytes in PERIOD_S.

    allowance = ProbeAllowance(64_000_000)
    grant = allowance.grant("QmAda", "203.0.113.0/24", 4_000_000, now=0.0)
    allowance.ended(grant, used=3_100_000)
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._grants: deque[Grant] = deque()

    def grant(self, peer: str, network: str, asked: int, now: float) -> Grant:
        """All of `asked` if as much is left for this peer and its network; else 0 bytes."""
        while self._grants and now - self._grants[0].at >= PERIOD_S:
            self._grants.popleft()
        left = min(
            self._total - sum(one.nbytes for one in self._grants),
            PER_PEER - sum(one.nbytes for one in self._grants if one.peer == peer),
        )
        if network:
            share = self._total // NETWORK_SHARE
            left = min(left, share - sum(one.nbytes for one in self._grants if one.network == network))
        grant = Grant(peer, network, asked if asked <= left else 0, now)
        if grant.nbytes:
            self._grants.append(grant)
        return grant

    def ended(self, grant: Grant, used: int) -> None:
        """The probe of `grant` is over and took `used` bytes; the rest is given back."""
        grant.nbytes = min(used, grant.nbytes)
