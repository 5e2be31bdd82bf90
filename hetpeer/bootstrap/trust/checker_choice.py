"""Choice of checkers in a step: a volunteer is checked by another holder of all its blocks (docs/trust.md).

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from hetpeer.bootstrap.conduct.check_rules import CheckRules
from hetpeer.bootstrap.conduct.reputation import Reputation
from hetpeer.bootstrap.state.membership import Range
from hetpeer.bootstrap.trust.spot_check import SpotCheck


def fellows(peer: str, roster: Mapping[str, Range]) -> list[str]:
    """Other volunteers on `roster` that hold all blocks of `peer`."""
    begin, end = roster[peer]
    return sorted(
        other for other, (first, last) in roster.items() if first <= begin and end <= last and other != peer
    )


def unchecked(roster: Mapping[str, Range]) -> list[str]:
    """Volunteers on `roster` that nobody can check, since no other one holds all their blocks."""
    return sorted(peer for peer in roster if not fellows(peer, roster))


class CheckerChoice:
    """Checkers of a step, chosen along a random circle in which each volunteer checks the one before it.

    `roster` changes as volunteers join and leave the step.
    """

    def __init__(self, rules: CheckRules | None, standings: Reputation, roster: Mapping[str, Range]) -> None:
        self._rules = rules
        self._standings = standings
        self._roster = roster
        self._places: dict[str, float] = {}
        """Volunteer → its place in the circle, drawn on first use."""

    def checker(self, peer: str, checks: Iterable[SpotCheck]) -> str | None:
        """The next volunteer in the circle that checks nobody in `checks`, else one that checks one other.

        The latter serves volunteers that joined the step after all others had somebody to check.
        """
        times = Counter(one for check in checks for one in check.checkers)
        busy, twice = ({one for one, number in times.items() if number > least} for least in (0, 1))
        among = self._able(peer, busy) or self._able(peer, twice)
        return min(among, key=lambda other: (self._place(other) - self._place(peer)) % 1.0, default=None)

    def third(self, check: SpotCheck, checks: Iterable[SpotCheck]) -> str | None:
        """A third checker for `check`: not heard yet, and not known to have given false numbers in this
        step.
        """
        assert self._rules is not None
        suspects = {one.outcome.culprit for one in checks if one is not check}
        able = self._able(check.peer, {*check.checkers, *suspects})
        return able[int(self._rules.draw() * len(able))] if able else None

    def _able(self, peer: str, without: Collection[str]) -> list[str]:
        """Volunteers that can check `peer` and answer, except those in `without`."""
        return [
            other
            for other in fellows(peer, self._roster)
            if other not in without and not self._standings.is_mute(other)
        ]

    def _place(self, peer: str) -> float:
        """Place of `peer` in the circle; a circle leaves nobody for whom only itself would be free."""
        assert self._rules is not None
        if peer not in self._places:
            self._places[peer] = self._rules.draw()
        return self._places[peer]
