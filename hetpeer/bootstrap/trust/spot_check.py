"""One spot check: another holder computes a contribution again, and fingerprints are compared. Pure.

step_spot_checks.py decides who lends the checker which tensors when, and acts on the verdict (docs/trust.md).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.reputation import CheckDuty, CheckRules, Duty
from hetpeer.bootstrap.trust.checker_reports import (
    AwaitedWord,
    CheckedPiece,
    CheckerReport,
    CheckRoute,
    MeasuredRounding,
    Source,
)
from hetpeer.bootstrap.trust.verdicts import CheckCase, CheckOutcome, CheckVerdict, marks_of


class SpotCheck:
    """Spot check `number` of a step (1, 2, …): `checker` checks `peer`'s contributions; a third may join."""

    def __init__(self, number: int, peer: str, checker: str) -> None:
        self.number = number
        self.peer = peer
        self.opinions = [CheckerReport(checker)]
        self.outcome = CheckOutcome(CheckVerdict.OPEN)
        self.pieces: list[CheckedPiece] = []
        """Accepted contributions of `peer`."""
        self.took_part: set[Duty] = set()
        """Duties that were requested."""
        self._plan = 0
        """Plan under which fingerprints are shown."""
        self._asked: set[str] = set()
        self._received: dict[str, tuple[m.Mark, ...]] = {}
        """Reducer → fingerprints of what it received from `peer`."""
        self._said: tuple[m.Mark, ...] = ()
        """Fingerprints of all that `peer` sent, by its own statement: nobody else sees its own share."""
        self._heard = False
        """Whether `peer` is asked for the inputs that it computed from."""
        self._rounding = MeasuredRounding()
        self._given: Mapping[Source, m.Given] | None = None
        """The inputs that `peer` computed from, by its statement."""

    def __repr__(self) -> str:
        by = ", ".join(opinion.peer[-6:] for opinion in self.opinions)
        return f"<spot check {self.number} of {self.peer[-6:]} by {by}: {self.outcome.verdict.value}>"

    @property
    def open(self) -> bool:
        """Whether there is no verdict yet."""
        return self.outcome.verdict is CheckVerdict.OPEN

    @property
    def blocks(self) -> set[int]:
        """Blocks with a contribution of `peer`."""
        return {block for piece in self.pieces for block in range(piece.begin, piece.end)}

    @property
    def checkers(self) -> list[str]:
        """Peers that compute again, in the order in which they were asked."""
        return [opinion.peer for opinion in self.opinions]

    # ── computed once more ──────────────────────────────────────────────────────────────────────────────────

    def accepted(self, pieces: Iterable[CheckedPiece]) -> None:
        """Add accepted contributions of `peer`."""
        new = list(pieces)
        self.pieces += new
        for opinion in self.opinions:
            opinion.waiting.extend(new)

    def third(self, checker: str) -> None:
        """Add a third checker after a difference; `peer` is asked for the inputs that it computed from."""
        self.opinions.append(CheckerReport(checker, deque(self.pieces)))
        self.void()

    def goes(self, opinion: CheckerReport, piece: CheckedPiece, way: CheckRoute) -> bool:
        """Note the route by which `opinion` computes `piece`. Returns whether it is new."""
        self.took_part |= way.duties | {
            (word.peer, CheckDuty.COMPARES) for word in way.words(piece, self.peer)
        }
        return opinion.goes(piece, way, self.peer)

    def weighed(self, checker: str, said: m.Checked) -> None:
        """Note what `checker` says of rounding in a piece that it was asked to compute."""
        for opinion in self.opinions:
            piece = opinion.piece_under_way(said.id, said.begin)
            if opinion.peer == checker and piece is not None:
                self._rounding.add(piece, said)

    def done(self, checker: str, microbatch: int, begin: int) -> bool:
        """Note that `checker` has computed a piece. Returns whether it was asked to."""
        return any(
            opinion.peer == checker and opinion.computed(microbatch, begin) for opinion in self.opinions
        )

    def compared(self, peer: str, word: m.Compared) -> bool:
        """Note a comparison by `peer` of a checker's bundle. Returns whether it was asked to."""
        said = AwaitedWord(peer, word.id, word.border, word.back)
        known = any(
            opinion.peer == word.peer and opinion.said(said, word.alike, word.differ, word.apart)
            for opinion in self.opinions
        )
        if known and word.differ and self.has_asked and not self._heard:
            self.void()  # `peer` is accused only now: it is asked for its inputs as well
        return known

    def spare(self, mute: Callable[[str], bool]) -> None:
        """Stop waiting for statements of `mute` peers."""
        for opinion in self.opinions:
            opinion.spare(mute)

    @property
    def finished(self) -> bool:
        """Whether all checkers have computed all pieces."""
        return all(opinion.finished for opinion in self.opinions)

    @property
    def computed(self) -> bool:
        """Whether all checkers have computed all pieces, and all awaited comparisons are here."""
        return all(opinion.over for opinion in self.opinions)

    @property
    def answered(self) -> set[Duty]:
        """Requested duties, less open ones and comparisons by peers that may lack the checker's bundle."""
        unsaid = {(word.peer, CheckDuty.COMPARES) for by in self.opinions for word in by.unsaid}
        return self.took_part - unsaid - {duty for by in self.opinions for duty in by.awaited}

    def is_of(self, covers: Mapping[int, Sequence[tuple[str, tuple[int, ...]]]]) -> bool:
        """Whether the recomputed contributions are those of `peer` in `covers`."""
        theirs = {
            (block, i)
            for block, sums in covers.items()
            for peer, ids in sums
            if peer == self.peer
            for i in ids
        }
        return theirs == {(block, p.id) for p in self.pieces for block in range(p.begin, p.end)}

    # ── shown ───────────────────────────────────────────────────────────────────────────────────────────────

    def void(self) -> None:
        """Discard shown fingerprints: there is a new plan, or another checker."""
        self._asked.clear()
        self._received.clear()
        self._said = ()
        for opinion in self.opinions:
            opinion.marks = None

    def ask(
        self, plan: int, reducers: Iterable[str], *, said: Iterable[m.Mark] = (), mute: bool = False
    ) -> list[str]:
        """Ask reducers, once all pieces are computed, for fingerprints of what they received under `plan`.

        `said` has the statements of `peer`. If somebody accuses `peer`, it is asked for the inputs that it
        computed from, unless it is `mute`. Returns the peers to ask.
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
        """Whether reducers were asked about `plan`; an answer may come late, for a void plan."""
        return self.has_asked and plan == self._plan

    @property
    def has_asked(self) -> bool:
        """Whether reducers were asked, under the current plan, for fingerprints of what `peer` sent them."""
        return bool(self._asked)

    def received(self, reducer: str, marks: tuple[m.Mark, ...]) -> tuple[m.Mark, ...] | None:
        """Take a reducer's fingerprints. Returns those that checkers must show, once all are here."""
        if reducer not in self._asked or reducer in self._received:
            return None
        several = len({mark.block for mark in marks}) < len(marks)
        self._received[reducer] = () if several else marks
        if self._received.keys() != self._asked:
            return None
        known = [mark for own in (*self._received.values(), self._said) for mark in own]
        return tuple(mark.model_copy(update={"values": b""}) for mark in known)

    def shown(self, peer: str, marks: Iterable[m.Mark], given: Iterable[m.Given]) -> None:
        """Take a checker's fingerprints, or the inputs that `peer` computed from."""
        sources = {(one.id, one.begin, one.back): one for one in given}
        if peer == self.peer and self._heard:
            self._given = sources
        for opinion in self.opinions:
            if opinion.peer == peer and self._received.keys() == self._asked:
                opinion.marks = marks_of(marks)
                opinion.given = sources

    @property
    def silent(self) -> set[Duty]:
        """Duties of showing that are still open."""
        reducers = self._asked - self._received.keys()
        checkers = {opinion.peer for opinion in self.opinions if opinion.marks is None}
        shows = {(peer, CheckDuty.SHOWS) for peer in reducers or checkers}
        return shows or ({(self.peer, CheckDuty.EXPLAINS)} if self._heard and self._given is None else set())

    @property
    def complete(self) -> bool:
        """Whether everything requested is shown."""
        return self.has_asked and not self.silent

    def judge(self, rules: CheckRules, *, alone: bool = False) -> CheckOutcome:
        """Outcome by all that is shown. OPEN: a third checker is needed; `alone`: there is none."""
        return self._case(rules).judge(alone=alone)

    def unfinished(self, rules: CheckRules) -> CheckOutcome:
        """Outcome if the check ends unfinished."""
        return self._case(rules).unfinished()

    def _case(self, rules: CheckRules) -> CheckCase:
        received = self._received | ({self.peer: self._said} if self._said else {})
        opinions = [opinion.without(self._rounding) for opinion in self.opinions]
        counts = Counter(block for piece in self.pieces for block in range(piece.begin, piece.end))

        def same(block: int, one: bytes, other: bytes) -> bool:
            apart = rules.difference(one, other)
            return rules.same(one, other) or self._rounding.explains_sum(block, counts[block], apart)

        return CheckCase(self.peer, received, self._given or {}, opinions, same)
