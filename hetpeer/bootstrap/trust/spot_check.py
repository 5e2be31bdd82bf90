"""One spot check: what a holder counts in a step is computed once more by another holder, and the fingerprints are compared (docs/trust.md).

Pure. Who is lent what, when, and what follows from a verdict is step_spot_checks.py's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.check_rules import CheckRules
from hetpeer.bootstrap.conduct.reputation import CheckDuty, Duty
from hetpeer.bootstrap.trust.checker_reports import (
    AwaitedWord,
    CheckedPiece,
    CheckerReport,
    CheckRoute,
    Source,
)
from hetpeer.bootstrap.trust.verdicts import CheckCase, CheckOutcome, CheckVerdict, marks_of


class SpotCheck:
    """Of `peer`, by `checker` first; `number` names it in its step."""

    def __init__(self, number: int, peer: str, checker: str) -> None:
        self.number = number
        self.peer = peer
        self.opinions = [CheckerReport(checker)]
        self.outcome = CheckOutcome(CheckVerdict.OPEN)
        self.pieces: list[CheckedPiece] = []
        """All that `peer` counts, as far as it has been accepted."""
        self.took_part: set[Duty] = set()
        """Who was asked for something."""
        self._plan = 0
        """Under which all is shown."""
        self._asked: set[str] = set()
        self._received: dict[str, tuple[m.Mark, ...]] = {}
        """Reducer → what it had from `peer`."""
        self._said: tuple[m.Mark, ...] = ()
        """How all that it has sent looks, as `peer` says itself: of its own share nobody else knows."""
        self._heard = False
        """Whether `peer` is asked what it has computed from."""
        self._given: Mapping[Source, m.Given] | None = None
        """What it says."""

    def __repr__(self) -> str:
        by = ", ".join(opinion.peer[-6:] for opinion in self.opinions)
        return f"<spot check {self.number} of {self.peer[-6:]} by {by}: {self.outcome.verdict.value}>"

    @property
    def open(self) -> bool:
        return self.outcome.verdict is CheckVerdict.OPEN

    @property
    def blocks(self) -> set[int]:
        """At which `peer` counts something."""
        return {block for piece in self.pieces for block in range(piece.begin, piece.end)}

    @property
    def checkers(self) -> list[str]:
        return [opinion.peer for opinion in self.opinions]

    # ── computed once more ───────────────────────────────────────────────────────────────────────────────────────

    def accepted(self, pieces: Iterable[CheckedPiece]) -> None:
        """`peer` counts these, too."""
        new = list(pieces)
        self.pieces += new
        for opinion in self.opinions:
            opinion.waiting.extend(new)

    def third(self, checker: str) -> None:
        """Two differ: `checker` is to decide, and `peer` to say what it has computed from."""
        self.opinions.append(CheckerReport(checker, deque(self.pieces)))
        self.void()

    def goes(self, opinion: CheckerReport, piece: CheckedPiece, way: CheckRoute) -> bool:
        """`opinion` computes `piece` like this. Whether that is new."""
        self.took_part |= way.duties | {
            (word.peer, CheckDuty.COMPARES) for word in way.words(piece, self.peer)
        }
        return opinion.goes(piece, way, self.peer)

    def done(self, checker: str, microbatch: int, begin: int) -> bool:
        """`checker` has computed one of them. Whether it was asked to."""
        return any(
            opinion.peer == checker and opinion.computed(microbatch, begin) for opinion in self.opinions
        )

    def compared(self, peer: str, word: m.Compared) -> bool:
        """`peer` has compared what a checker sent with what had come in its place. Whether it was asked to."""
        said = AwaitedWord(peer, word.id, word.border, word.back)
        known = any(
            opinion.peer == word.peer and opinion.said(said, word.alike, word.differ)
            for opinion in self.opinions
        )
        if known and word.differ and self.asks and not self._heard:
            self.void()  # who is accused now is to be heard, too
        return known

    def spare(self, mute: Callable[[str], bool]) -> None:
        """Nobody waits for what those could say who are `mute`."""
        for opinion in self.opinions:
            opinion.spare(mute)

    @property
    def finished(self) -> bool:
        """Whether all who check have done all of it."""
        return all(opinion.finished for opinion in self.opinions)

    @property
    def computed(self) -> bool:
        """Whether all who check have done all of it, and those who got something of it, and are waited for, have spoken."""
        return all(opinion.over for opinion in self.opinions)

    @property
    def answered(self) -> set[Duty]:
        """Who was asked for something, but for those whose word is still out, and the checkers that it is about: they may not have sent it."""
        unsaid = {(word.peer, CheckDuty.COMPARES) for by in self.opinions for word in by.unsaid}
        return self.took_part - unsaid - {duty for by in self.opinions for duty in by.awaited}

    def is_of(self, covers: Mapping[int, Sequence[tuple[str, tuple[int, ...]]]]) -> bool:
        """Whether what was computed once more is what `peer` counts in `covers`."""
        theirs = {
            (block, i)
            for block, sums in covers.items()
            for peer, ids in sums
            if peer == self.peer
            for i in ids
        }
        return theirs == {(block, p.id) for p in self.pieces for block in range(p.begin, p.end)}

    # ── shown ────────────────────────────────────────────────────────────────────────────────────────────────────

    def void(self) -> None:
        """There is another plan, or another opinion to be heard: everything is to be shown once more."""
        self._asked.clear()
        self._received.clear()
        self._said = ()
        for opinion in self.opinions:
            opinion.marks = None

    def ask(
        self, plan: int, reducers: Iterable[str], *, said: Iterable[m.Mark] = (), mute: bool = False
    ) -> list[str]:
        """All have computed: these of `reducers` are to show what they have received under `plan`, beside what `peer` has `said`; and `peer` what it has computed from,
        if somebody says that it has given something false; but not if it is `mute`: then it has no excuse.
        """
        self._plan, self._said = plan, tuple(said)
        self._asked = {peer for peer in reducers if peer != self.peer}
        self.took_part |= {(peer, CheckDuty.SHOWS) for peer in self._asked}
        self._heard = not mute and (len(self.opinions) > 1 or bool(self.opinions[0].accusations))
        if not self._heard:
            return sorted(self._asked)
        self.took_part.add((self.peer, CheckDuty.EXPLAINS))
        return sorted(self._asked | {self.peer})

    def is_under(self, plan: int) -> bool:
        """Whether what is shown under `plan` is what was asked for: it may come late, of a plan that is void."""
        return self.asks and plan == self._plan

    @property
    def asks(self) -> bool:
        """Whether reducers have been asked."""
        return bool(self._asked)

    def received(self, reducer: str, marks: tuple[m.Mark, ...]) -> tuple[m.Mark, ...] | None:
        """`reducer` shows its fingerprints, one of each block. When all have, what the checkers are to show; None before."""
        if reducer not in self._asked or reducer in self._received:
            return None
        several = len({mark.block for mark in marks}) < len(marks)
        self._received[reducer] = () if several else marks
        if self._received.keys() != self._asked:
            return None
        known = [mark for own in (*self._received.values(), self._said) for mark in own]
        return tuple(mark.model_copy(update={"values": b""}) for mark in known)

    def shown(self, peer: str, marks: Iterable[m.Mark], given: Iterable[m.Given]) -> None:
        """A checker shows its own, or `peer` what it has computed from."""
        sources = {(one.id, one.begin, one.back): one for one in given}
        if peer == self.peer and self._heard:
            self._given = sources
        for opinion in self.opinions:
            if opinion.peer == peer and self._received.keys() == self._asked:
                opinion.marks = marks_of(marks)
                opinion.given = sources

    @property
    def silent(self) -> set[Duty]:
        """Who has not shown what it was asked for."""
        reducers = self._asked - self._received.keys()
        checkers = {opinion.peer for opinion in self.opinions if opinion.marks is None}
        shows = {(peer, CheckDuty.SHOWS) for peer in reducers or checkers}
        return shows or ({(self.peer, CheckDuty.EXPLAINS)} if self._heard and self._given is None else set())

    @property
    def complete(self) -> bool:
        """Whether everything is shown."""
        return self.asks and not self.silent

    def judge(self, rules: CheckRules, *, alone: bool = False) -> CheckOutcome:
        """What follows from what was shown and said. OPEN: two differ, and a third is to be heard; with `alone` there is none."""
        return self._case(rules).judge(alone=alone)

    def unfinished(self, rules: CheckRules) -> CheckOutcome:
        """What follows if it goes on no longer."""
        return self._case(rules).unfinished()

    def _case(self, rules: CheckRules) -> CheckCase:
        received = self._received | ({self.peer: self._said} if self._said else {})
        return CheckCase(self.peer, received, self._given or {}, self.opinions, rules.same)
