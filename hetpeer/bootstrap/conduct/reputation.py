"""What volunteers have earned and forfeited by the spot checks so far: who is asked to check, and who is looked at in any case (docs/trust.md). Pure.

Nobody is banned here. Who lets checks lapse is not asked to check any more, and not waited for; who does, or is in dispute with several others, is
itself checked for a while. Of a check that lapsed nobody may know which of several held it up: then it is held against each of them, unless one is known
for that, or all checks of the step have waited for it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

LAPSES = 3
"""Checks in a row that have waited for it in vain."""
WATCHED = 20
"""Contributions that are checked in any case."""
DISPUTES = 3
"""With so many others."""
RECENT = 100
"""Contributions after which a dispute is forgotten."""
MAX_PAIRS = 1 << 14
MAX_PEERS = 4096
"""That are remembered; of those before them nothing is known."""


class CheckDuty(enum.Enum):
    """What somebody does in a check. Who does one of them need not do another."""

    CHECKS = "checks"
    LENDS = "lends"
    ANSWERS = "answers"
    COMPARES = "compares"
    SHOWS = "shows"
    EXPLAINS = "explains"


Duty = tuple[str, CheckDuty]
"""A peer, and what it is to do."""


@dataclass(slots=True)
class _PeerRecord:
    contributions: int = 0
    lapses: Counter[CheckDuty] = field(default_factory=Counter)
    """In a row."""
    watched: int = 0
    """So many contributions are checked in any case."""
    disputes: dict[str, int] = field(default_factory=dict)
    """With whom → contributions until then."""


class Reputation:
    """Those of one reign."""

    def __init__(self) -> None:
        self._known: dict[str, _PeerRecord] = {}
        self.apart: set[frozenset[str]] = set()
        """Pairs between which no bundle is to pass: one of the two has given the other something false, or says so falsely."""
        self._witness: dict[frozenset[str], str] = {}
        """Those of them of which one checker alone says so."""

    def _of(self, peer: str) -> _PeerRecord:
        known = self._known.setdefault(peer, _PeerRecord())
        if len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]
        return known

    def contributes(self, peer: str) -> bool:
        """`peer` counts something in one more step. Whether that is to be checked in any case."""
        one = self._of(peer)
        one.contributions += 1
        watched = one.watched > 0
        one.watched -= watched
        return watched

    def is_mute(self, peer: str) -> bool:
        """Whether checks have lapsed because of `peer` so often that nobody waits for it."""
        known = self._known.get(peer)
        return known is not None and max(known.lapses.values(), default=0) >= LAPSES

    def answered(self, duties: Iterable[Duty]) -> None:
        """A check has not waited for any of these in vain. Once mute, a peer stays so."""
        for peer, part in duties:
            if not self.is_mute(peer):
                del self._of(peer).lapses[part]

    def lapsed(self, waits: Iterable[Collection[Duty]]) -> None:
        """Checks of a step have waited in vain, each for one of its duties, or more. Who has held up several has done so once. Those that wait
        for nobody known for it are held against whoever is in all of them, or against everybody, where nobody is.
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
        """These two and two are not to work together any more, as far as that can be avoided, as two checkers say, or `witness` alone. Whether that is new:
        else it would not help to begin anew.
        """
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
        """Whether `peer` is apart from more than one of `neighbours`, and from most, as two checkers have found each time."""
        sure = self.apart - self._witness.keys()
        against = sum(frozenset((peer, other)) in sure for other in neighbours)
        return against > 1 and 2 * against > len(neighbours)

    def banned(self, peer: str) -> None:
        """It is known by now who of those apart has lied, or who of the checkers."""
        self.apart = {one for one in self.apart if peer not in one and self._witness.get(one) != peer}
        self._witness = {pair: by for pair, by in self._witness.items() if pair in self.apart}

    def disputed(self, one: str, other: str) -> None:
        """The words of these two are against each other."""
        for peer, with_whom in ((one, other), (other, one)):
            record = self._of(peer)
            since = record.contributions - RECENT
            record.disputes = {who: at for who, at in record.disputes.items() if at > since}
            record.disputes[with_whom] = record.contributions
            if len(record.disputes) >= DISPUTES:
                record.watched = WATCHED
                record.disputes.clear()
