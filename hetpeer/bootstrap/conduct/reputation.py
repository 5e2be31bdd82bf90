"""Rules of spot checks, and the reputation of volunteers by them: who checks others, and
who is always checked (docs/trust.md). Pure.

Nobody is banned here. A volunteer that lets checks lapse is no longer asked to check, and not waited for.
Such a volunteer, and one in dispute with several others, is itself checked for a while. If it is unknown
which of several volunteers held up a lapsed check, it counts against each of them, unless one is known for it
or all checks of the step waited for the same one.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

EQUAL = 1e-9
"""Relative distance of two fingerprints of the same bits, as different processors add float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRules:
    """Settings of spot checks and sum proofs; nobody can foresee `draw()`, in [0, 1), nor `key()`."""

    share: float = 0.0
    """Share of contributions that are checked, in [0, 1]."""
    tolerance: float = 1e-3
    """Largest relative distance of two honest sums."""
    proves: bool = True
    """Whether sums are proven before they are committed."""
    draw: Callable[[], float]
    key: Callable[[], bytes]
    distance: Callable[[bytes, bytes], float]
    difference: Callable[[bytes, bytes], float] = lambda _one, _other: math.inf
    """(fingerprint, fingerprint) → length of the difference; `distance` is relative to the first."""

    def same(self, one: bytes, other: bytes) -> bool:
        """Whether two fingerprints are of the same numbers, within `tolerance`."""
        return self.distance(one, other) <= self.tolerance

    def equal(self, one: bytes, other: bytes) -> bool:
        """Whether two fingerprints are of the same bits."""
        return self.distance(one, other) <= EQUAL


LAPSES = 3
"""Lapsed checks in a row after which a volunteer counts as mute."""
WATCHED = 20
"""Contributions that are always checked after a lapse or several disputes."""
DISPUTES = 3
"""Number of others in dispute with a volunteer that make it watched."""
RECENT = 100
"""Contributions after which a dispute is forgotten."""
MAX_PAIRS = 1 << 14
MAX_PEERS = 4096
"""Number of peers and pairs that are remembered, the newest."""


class CheckDuty(enum.Enum):
    """Duty of a volunteer in a spot check."""

    CHECKS = "checks"
    LENDS = "lends"
    ANSWERS = "answers"
    COMPARES = "compares"
    SHOWS = "shows"
    EXPLAINS = "explains"


Duty = tuple[str, CheckDuty]
"""A peer and its duty in a check."""


@dataclass(slots=True)
class _PeerRecord:
    contributions: int = 0
    lapses: Counter[CheckDuty] = field(default_factory=Counter)
    """Lapses in a row, by duty."""
    watched: int = 0
    """Number of further contributions that are always checked."""
    disputes: dict[str, int] = field(default_factory=dict)
    """Other peer → number of contributions at the time of the dispute."""


class Reputation:
    """Reputation of volunteers in one term."""

    def __init__(self) -> None:
        self._known: dict[str, _PeerRecord] = {}
        self.apart: set[frozenset[str]] = set()
        """Separated pairs, between which no bundle passes: one gave false data, or says so falsely."""
        self._witness: dict[frozenset[str], str] = {}
        """Separated pairs by the statement of a single checker."""

    def _of(self, peer: str) -> _PeerRecord:
        known = self._known.setdefault(peer, _PeerRecord())
        if len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]
        return known

    def contributes(self, peer: str) -> bool:
        """Count a step to which `peer` contributes. Returns whether it is checked in any case."""
        one = self._of(peer)
        one.contributions += 1
        watched = one.watched > 0
        one.watched -= watched
        return watched

    def is_mute(self, peer: str) -> bool:
        """Whether checks lapsed because of `peer` so often that nobody waits for it."""
        known = self._known.get(peer)
        return known is not None and max(known.lapses.values(), default=0) >= LAPSES

    def answered(self, duties: Iterable[Duty]) -> None:
        """Note fulfilled duties. A mute peer stays mute."""
        for peer, part in duties:
            if not self.is_mute(peer):
                del self._of(peer).lapses[part]

    def lapsed(self, waits: Iterable[Collection[Duty]]) -> None:
        """Note lapsed checks of a step, each with the duties that it waited for.

        A peer that held up several checks is blamed once. Checks that wait for no peer known for lapses are
        blamed on the peers that occur in all of them, or on everybody if there is none.
        """
        blamed: set[Duty] = set()
        unexplained: list[Collection[Duty]] = []
        for duties in waits:
            known = [duty for duty in duties if self.is_mute(duty[0])]
            blamed.update(known)
            if duties and not known:
                unexplained.append(duties)
        in_all = set.intersection(*({peer for peer, _ in duties} for duties in unexplained or [()]))
        blamed |= {duty for duties in unexplained for duty in duties if not in_all or duty[0] in in_all}
        for peer, part in blamed:
            one = self._of(peer)
            one.lapses[part] += 1
            if one.lapses[part] == LAPSES:
                one.watched = WATCHED

    def part(self, pairs: Iterable[frozenset[str]], witness: str = "") -> bool:
        """Separate `pairs` by two checkers' words, or `witness`'s alone. Returns whether a retry may help."""
        found = {pair for pair in pairs if len(pair) > 1}
        fresh = found - self.apart
        if len(self.apart) < MAX_PAIRS:
            self.apart |= fresh
        if not witness:
            self._witness = {pair: by for pair, by in self._witness.items() if pair not in found}
        elif fresh <= self.apart:
            self._witness |= dict.fromkeys(fresh, witness)
        return bool(fresh & self.apart)

    def is_shunned(self, peer: str, neighbours: Collection[str]) -> bool:
        """Whether two checkers each separated `peer` from most of `neighbours`, and from more than one."""
        sure = self.apart - self._witness.keys()
        against = sum(frozenset((peer, other)) in sure for other in neighbours)
        return against > 1 and 2 * against > len(neighbours)

    def banned(self, peer: str) -> None:
        """Forget separations of `peer`, or by its sole statement, now that it is known as a liar."""
        self.apart = {one for one in self.apart if peer not in one and self._witness.get(one) != peer}
        self._witness = {pair: by for pair, by in self._witness.items() if pair in self.apart}

    def disputed(self, one: str, other: str) -> None:
        """Note a dispute between two peers."""
        for peer, with_whom in ((one, other), (other, one)):
            record = self._of(peer)
            since = record.contributions - RECENT
            record.disputes = {who: at for who, at in record.disputes.items() if at > since}
            record.disputes[with_whom] = record.contributions
            if len(record.disputes) >= DISPUTES:
                record.watched = WATCHED
                record.disputes.clear()
