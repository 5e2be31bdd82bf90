"""How many ids of a step a volunteer is given at most, where it has sat on some: additive increase, multiplicative decrease. Pure.

Whoever takes ids and does not do them costs a step two stall time-outs, or, if they are few, the time until the last ones are handed out a
second time. So an allowance is counted in handfuls: as many ids as the end of a step takes in its stride (timeouts.py). Nobody has one at
first. Who counts less than half of what had to be taken from it falls to half a handful a step, the next time to a quarter, and so on; less
than one is saved up, so that after three times it is tried in every eighth step. What it counts raises its allowance, until that does not
bind any more. How deep it falls the next time is forgiven slowly, so that who works for some steps and then sits on the next one gains
nothing. (TCP's way with a line that loses what it is given: Chiu and Jain, 1989; Jacobson, 1988.)

It only says who is asked: what counts is decided by the exact cover, and where nobody else holds a block there is no limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hetpeer.bootstrap.state.timeouts import few

FIRST = 0.5
"""Handfuls a step after the first fault."""
DECREASE = 0.5
LEAST = 2.0**-10
"""A handful in so large a part of steps at least: who has mended its ways is found out some day."""
INCREASE = 0.5
"""Of each id that is counted."""
FORGIVEN = 2.0 ** (1 / 32)
"""So much less deep is the next fall with each step that goes well."""
MAX_PEERS = 1024
"""That are remembered; those before them begin again without a limit."""


@dataclass(slots=True)
class _Allowance:
    handfuls: float = 0.0
    """A step."""
    saved: float = 0.0
    falls_to: float = FIRST
    """Handfuls after the next fault."""


class IssueLimits:
    """Those of one reign."""

    def __init__(self) -> None:
        self._limited: dict[str, _Allowance] = {}

    def __contains__(self, peer: str) -> bool:
        """Whether `peer` has a limit."""
        return peer in self._limited

    @property
    def limited(self) -> Collection[str]:
        """Who has a limit."""
        return self._limited.keys()

    def limits(self, peers: Collection[str], ids: int) -> dict[str, int]:
        """A step of `ids` begins with `peers`: how many each of those that have a limit is given at most. Those that are only tried get a handful together: else a step
        would end with more that is stuck than it takes in its stride, as soon as two of them have saved up for the same one.
        """
        found, tried = dict[str, int](), 0
        for peer, one in self._limited.items():
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
        """A step of `ids` is done: how many were taken from each peer because nothing came of them, and how many each counts."""
        for peer, number in taken.items():
            if number > 2 * counted.get(peer, 0):
                self._fall(peer)
        for peer, number in counted.items():
            if number and peer in self._limited and taken.get(peer, 0) <= 2 * number:
                self._rise(peer, number, ids)

    def _fall(self, peer: str) -> None:
        one = self._limited.setdefault(peer, _Allowance())
        one.handfuls, one.saved = one.falls_to, 0.0
        one.falls_to = max(one.falls_to * DECREASE, LEAST)
        if len(self._limited) > MAX_PEERS:
            del self._limited[next(iter(self._limited))]

    def _rise(self, peer: str, counted: int, ids: int) -> None:
        one = self._limited[peer]
        one.handfuls = min(one.handfuls + INCREASE * counted / few(ids), ids / few(ids))
        one.falls_to = min(one.falls_to * FORGIVEN, FIRST)
        if one.handfuls * few(ids) >= ids and one.falls_to >= FIRST:
            del self._limited[peer]
