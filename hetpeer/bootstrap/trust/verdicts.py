"""Verdict on one spot check (docs/trust.md). Pure.

Three kinds of data are compared: sums, as reducers received them; outputs and gradients, by the statements of
the peers that computed from them. A third checker decides if it computed from the same inputs as the others.
A single accuser, or a minority of the peers that could compare, may lie; then nobody is convicted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.trust.checker_reports import Accusation, Charge, CheckerReport, Marks, Source, torn

SUMS, OUTPUTS, GRADIENTS = "sums", "outputs", "gradients"
Same = Callable[[bytes, bytes], bool]
"""(fingerprint, fingerprint) → whether they are equal within rounding."""


class CheckedSums(Charge):
    """Charge about sums, as reducers received them."""

    @property
    def may_be_true(self) -> bool:
        """Whether several reducers found it, or the only one; then a third checker may still object."""
        return len(self.accusers) > 1 or self.of == 1


class CheckVerdict(enum.Enum):
    """Verdict of a check; OPEN: the check goes on."""

    OPEN = "open"
    PASSED = "passed"
    CONVICTED = "convicted"
    DISPUTED = "disputed"
    EVADED = "evaded"
    """The checked peer did not state the inputs that it computed from."""
    LAPSED = "lapsed"


class CheckOutcome(NamedTuple):
    """The convicted peer, or the two peers with contradicting statements."""

    verdict: CheckVerdict
    culprit: str = ""
    against: str = ""
    apart: frozenset[frozenset[str]] = frozenset()
    """Pairs of which one gave the other false data or says so falsely; others may have used that data."""
    witness: str = ""
    """The only checker that found the fault; empty if two did."""


@dataclass(frozen=True, slots=True)
class CheckCase:
    """Everything known about a check of `peer`."""

    peer: str
    received: Mapping[str, Sequence[m.Mark]]
    """Reducer → fingerprints of what it received, and `peer` → its own statement."""
    given: Mapping[Source, m.Given]
    """Inputs that `peer` computed from, by its statement."""
    opinions: Sequence[CheckerReport]
    same: Callable[[int, bytes, bytes], bool]
    """(block, fingerprint, fingerprint) → whether they are equal within rounding."""

    def judge(self, *, alone: bool = False) -> CheckOutcome:
        """The outcome. OPEN: a third checker is needed; with `alone` there is none."""
        first, *more = self.opinions
        charges = self._charges(first)
        if not any(self.received.values()) and not first.compared:
            return CheckOutcome(CheckVerdict.LAPSED)  # it has sent nothing to anybody else
        if not charges and not first.accusations:
            return CheckOutcome(CheckVerdict.PASSED)
        if charges.keys() == {SUMS} and not first.accusations and not self._may_be_true(charges[SUMS]):
            return CheckOutcome(CheckVerdict.DISPUTED, min(charges[SUMS].accusers), self.peer)
        if more:
            return self._settle(first, more[0])
        return self._unsettled(first) if alone else CheckOutcome(CheckVerdict.OPEN)

    def _may_be_true(self, charge: Charge) -> bool:
        """Whether a charge rests on more than one statement, or on that of `peer` itself."""
        return charge.may_be_true or self.peer in charge.accusers

    def unfinished(self) -> CheckOutcome:
        """Outcome of an unfinished check: statements on bundles made so far still count."""
        first = self.opinions[0]
        begun = first.accusations or len(self.opinions) > 1
        return self._unsettled(first) if begun else CheckOutcome(CheckVerdict.LAPSED)

    def _charges(self, by: CheckerReport) -> dict[str, Charge]:
        """Kind of data → charge against `peer` by this checker."""
        theirs = {reducer: marks_of(own) for reducer, own in self.received.items()}
        differ = [who for who, own in theirs.items() if not self._alike(own, by.marks or {}, own)]
        found = {OUTPUTS: by.charge(self.peer, back=False), GRADIENTS: by.charge(self.peer, back=True)}
        if differ:
            found[SUMS] = CheckedSums(frozenset(differ), sum(map(bool, theirs.values())))
        return {kind: charge for kind, charge in found.items() if charge is not None}

    def _unsettled(self, first: CheckerReport) -> CheckOutcome:
        """Outcome if no other checker can decide."""
        found = self._disputed(first, first.accusations, torn(self.given, first.given))
        return found._replace(witness=first.peer)

    def _settle(self, first: CheckerReport, second: CheckerReport) -> CheckOutcome:
        """Outcome by two checkers, if they computed from the same inputs."""
        one, other = self._charges(first), self._charges(second)
        both = first.accusations & second.accusations
        if not other and not both:
            return self._cleared(first, second, one)
        apart = torn(self.given, first.given) if one and other else None
        if apart is not None and torn(self.given, second.given) is not None:
            return self._disputed(first, both, apart)
        same = torn(first.given, second.given) is None
        if same and any(self._agree(kind, one[kind], other[kind]) for kind in one.keys() & other.keys()):
            return CheckOutcome(
                CheckVerdict.CONVICTED, self.peer, apart=frozenset(known.pair for known in both)
            )
        return self._disputed(first, both, None)

    def _disputed(
        self, first: CheckerReport, accusations: Iterable[Accusation], apart: m.Given | None
    ) -> CheckOutcome:
        """Outcome without a culprit. `apart`: a differing input, stated by `peer`, that would explain it."""
        known = {one for one in accusations if apart is None or one.suspect != self.peer}
        pairs = {(one.suspect, one.accuser) for one in known}
        if apart is not None:
            lender = first.given[apart.id, apart.begin, apart.back].peer
            pairs |= {(self.peer, apart.peer), (self.peer, lender)}
        suspect, accuser = min(pairs, default=(self.peer, first.peer))
        return CheckOutcome(CheckVerdict.DISPUTED, accuser, suspect, frozenset(map(frozenset, pairs)))

    def _cleared(
        self, first: CheckerReport, second: CheckerReport, charges: Mapping[str, Charge]
    ) -> CheckOutcome:
        """Outcome if the second checker sees no difference: the first is false, misled or wrongly accused."""
        apart = torn(first.given, second.given)
        sure = {kind: one for kind, one in charges.items() if kind == SUMS or not second.unsaid}
        if apart is None and any(map(self._may_be_true, (*sure.values(), _all_of(sure)))):
            return CheckOutcome(CheckVerdict.CONVICTED, first.peer)
        if sure != charges:
            return self._unsettled(first)  # the accusers may not have answered yet
        accusers = {peer for charge in charges.values() for peer in charge.accusers}
        accusers |= {one.accuser for one in first.accusations}
        return CheckOutcome(CheckVerdict.DISPUTED, min(accusers) if apart is None else apart.peer, first.peer)

    def _agree(self, kind: str, one: Charge, other: Charge) -> bool:
        """Whether both checkers find the same data of `kind` false.

        `one` is the charge by the first checker, `other` by the second. Outputs and gradients: with each
        checker a majority of several peers accuses `peer`, and at least one bundle is accused with both.
        Sums: with each checker several reducers accuse `peer`, or `peer`'s own statement differs from both
        checkers'; and the checkers' own fingerprints are equal.
        """
        first, second = self.opinions[:2]
        if kind != SUMS:
            places = (
                {(a.id, a.border) for a in by.accusations if a.suspect == self.peer} for by in (first, second)
            )
            return one.may_be_true and other.may_be_true and bool(set.intersection(*places))
        several = min(len(one.accusers), len(other.accusers)) > 1
        by_itself = self.peer in one.accusers & other.accusers
        marks = first.marks or {}
        return (several or by_itself) and self._alike(marks, second.marks or {}, marks)

    def _alike(self, one: Marks, other: Marks, places: Iterable[m.Where]) -> bool:
        """Whether the fingerprints at `places` are equal within rounding."""
        return all(self.same(place[0], other.get(place, b""), one.get(place, b"")) for place in places)


def _all_of(charges: Mapping[str, Charge]) -> Charge:
    """All accusers together: false outputs to one and false gradients to another contradict two peers."""
    accusers = frozenset(peer for charge in charges.values() for peer in charge.accusers)
    return Charge(accusers, sum(charge.of for charge in charges.values()))


def marks_of(marks: Iterable[m.Mark]) -> Marks:
    """`marks` by place."""
    return {mark.where: mark.values for mark in marks}
