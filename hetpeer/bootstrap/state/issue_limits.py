"""Issue limits: how many ids of a step a volunteer gets at most, if it has held some up.

Pure. A volunteer that takes ids and does not do them costs a step two stall timeouts. A few ids cost only the
time until the last ones are handed out a second time. So a limit is counted in handfuls: one is as many ids
as the end of a step can absorb (`few`).

Nobody has a limit at first. A volunteer that counts less than half of what was taken from it falls to half a
handful a step, the next time to a quarter, and so on. Less than one handful is saved up: after three falls it
is tried in every eighth step. What it counts raises its limit, until that no longer binds. How deep the next
fall is recovers slowly, so alternating good and bad steps gains nothing. This is additive increase,
multiplicative decrease, as in TCP (Chiu and Jain, 1989; Jacobson, 1988).

A limit only decides who is asked. The exact cover decides what counts, and where nobody else holds a block
there is no limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

FIRST = 0.5
"""Handfuls a step after the first fault."""
DECREASE = 0.5
LEAST = 2.0**-10
"""Least part of a handful a step: a volunteer that has improved is noticed some day."""
INCREASE = 0.5
"""Rise of the limit, in ids, for each id that is counted."""
FORGIVEN = 2.0 ** (1 / 32)
"""Factor by which the next fall is less deep after each good step."""
HEDGED = 0.05
"""Last ids of a step, as a share of all, that are handed out twice when they take too long."""
MAX_PEERS = 1024
"""Peers that are remembered; older ones begin again without a limit."""


@dataclass(slots=True)
class _Allowance:
    handfuls: float = 0.0
    """Handfuls a step."""
    saved: float = 0.0
    falls_to: float = FIRST
    """Handfuls after the next fault."""


class IssueLimits:
    """Limits of one term."""

    def __init__(self) -> None:
        self.limited: dict[str, _Allowance] = {}
        """Peers that have a limit."""

    def limits(self, peers: Collection[str], ids: int) -> dict[str, int]:
        """Peer with a limit → most ids of a step of `ids` that begins with `peers`.

        Those with less than one handful share one between them. Otherwise two that have saved up for the same
        step would hold up more than its end can absorb.
        """
        found, tried = dict[str, int](), 0
        for peer, one in self.limited.items():
            if peer not in peers:
                continue
            one.saved = min(one.saved + one.handfuls, max(one.handfuls, 1.0))
            found[peer] = int(one.saved * few(ids)) if one.saved >= 1.0 else 0
            if one.handfuls < 1.0:
                found[peer] *= tried + found[peer] <= few(ids)
                tried += found[peer]
            one.saved -= found[peer] / few(ids)
        return found

    def judge(self, taken: Mapping[str, int], counted: Mapping[str, int], ids: int) -> None:
        """Adapt limits after a step of `ids`.

        `taken`: peer → ids taken from it undone; `counted`: peer → ids it counts.
        """
        for peer, number in taken.items():
            if number > 2 * counted.get(peer, 0):
                self._fall(peer)
        for peer, number in counted.items():
            if number and peer in self.limited and taken.get(peer, 0) <= 2 * number:
                self._rise(peer, number, ids)

    def _fall(self, peer: str) -> None:
        one = self.limited.setdefault(peer, _Allowance())
        one.handfuls, one.saved = one.falls_to, 0.0
        one.falls_to = max(one.falls_to * DECREASE, LEAST)
        if len(self.limited) > MAX_PEERS:
            del self.limited[next(iter(self.limited))]

    def _rise(self, peer: str, counted: int, ids: int) -> None:
        one = self.limited[peer]
        one.handfuls = min(one.handfuls + INCREASE * counted / few(ids), ids / few(ids))
        one.falls_to = min(one.falls_to * FORGIVEN, FIRST)
        if one.handfuls * few(ids) >= ids and one.falls_to >= FIRST:
            del self.limited[peer]


def few(microbatches: int) -> int:
    """Undone ids that count as the last of a step of this many microbatches."""
    return max(1, int(HEDGED * microbatches))
