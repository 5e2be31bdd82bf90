"""Report of one checker: what it computed again, its fingerprints, others' comparisons of its bundles.

Pure. Docs: trust.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.reputation import CheckDuty, Duty
from hetpeer.stages.block.rounding import ROOM

UNDER_WAY = 2
"""Microbatches that a checker computes again at a time, beside its in-flight window."""

Marks = Mapping[m.Where, bytes]
Source = tuple[int, int, bool]
"""An input of a task: (microbatch, first block of the task, whether it is the gradient)."""


class CheckedPiece(NamedTuple):
    """A microbatch at the blocks [begin, end) of the peer that is checked."""

    id: int
    begin: int
    end: int


class AwaitedWord(NamedTuple):
    """Statement expected from `peer` on a checker's bundle: microbatch `id` at `border`; `back`: gradient."""

    peer: str
    id: int
    border: int
    back: bool


class Accusation(NamedTuple):
    """`accuser` computed from a bundle of `suspect`, and the checker's bundle in its place differs."""

    suspect: str
    accuser: str
    id: int
    border: int
    back: bool

    @property
    def pair(self) -> frozenset[str]:
        """Suspect and accuser: one of them is false, unless the checker is."""
        return frozenset((self.suspect, self.accuser))


class Charge(NamedTuple):
    """Peers that found a difference, among those that could compare."""

    accusers: frozenset[str]
    of: int
    """Number of peers that could compare."""

    @property
    def may_be_true(self) -> bool:
        """Whether more than one peer, and a majority, found the difference; fewer may lie."""
        return len(self.accusers) > 1 and 2 * len(self.accusers) > self.of


class CheckRoute(NamedTuple):
    """Sources of a checker: `lender` has a piece's input, `after` its output's gradient (None: the loss)."""

    lender: str
    checker: str
    after: str | None

    @property
    def duties(self) -> set[Duty]:
        """Duties of the peers involved."""
        lends = {(self.lender, CheckDuty.LENDS)} if self.lender != self.checker else set()
        answers = {(self.after, CheckDuty.ANSWERS)} if self.after is not None else set()
        return {(self.checker, CheckDuty.CHECKS), *lends, *answers}

    def words(self, piece: CheckedPiece, about: str) -> set[AwaitedWord]:
        """Statements expected on `piece`; nobody is asked about itself."""
        words = {AwaitedWord(self.lender, piece.id, piece.begin, back=True)}
        if self.after is not None:
            words.add(AwaitedWord(self.after, piece.id, piece.end, back=False))
        return {word for word in words if word.peer not in (self.checker, about)}


@dataclass(slots=True)
class MeasuredRounding:
    """Lengths of what rounding changes, as checkers have measured it: the largest of each place."""

    sums: dict[int, float] = field(default_factory=dict)
    """Block → of one microbatch's gradient."""
    bundles: dict[tuple[int, bool], float] = field(default_factory=dict)
    """(border, whether it is the gradient) → of one microbatch's bundle there."""

    def add(self, piece: CheckedPiece, said: m.Checked) -> None:
        """Note what a checker says of `piece`; microbatches that were not measured count as the others."""
        for block, length in zip(range(piece.begin, piece.end), said.sums, strict=False):
            self.sums[block] = max(length, self.sums.get(block, 0.0))
        for place, length in (((piece.begin, True), said.gradient), ((piece.end, False), said.output)):
            self.bundles[place] = max(length, self.bundles.get(place, 0.0))

    def explains_bundle(self, one: Accusation, apart: float) -> bool:
        """Whether the bundles of `one` may be `apart` because of rounding."""
        return apart <= ROOM * self.bundles.get((one.border, one.back), 0.0)

    def explains_sum(self, block: int, microbatches: int, apart: float) -> bool:
        """Whether two sums over `microbatches` at `block` may be `apart` because of rounding."""
        return apart <= ROOM * microbatches * self.sums.get(block, 0.0)


@dataclass(slots=True)
class CheckerReport:
    """Report of one checker, `peer`."""

    peer: str
    waiting: deque[CheckedPiece] = field(default_factory=deque)
    under_way: dict[CheckedPiece, CheckRoute | None] = field(default_factory=dict)
    done: set[CheckedPiece] = field(default_factory=set)
    marks: Marks | None = None
    given: Mapping[Source, m.Given] = field(default_factory=dict)
    """Inputs that the checker computed from."""
    accusations: set[Accusation] = field(default_factory=set)
    _apart: dict[Accusation, float] = field(default_factory=dict)
    """Accusation → length of the difference; infinite if it was not said."""
    _vouchers: set[Accusation] = field(default_factory=set)
    """Counterparts of accusations: comparisons that found no difference."""
    _awaited: set[AwaitedWord] = field(default_factory=set)
    _spared: set[AwaitedWord] = field(default_factory=set)
    """Statements that are accepted but not waited for."""

    def next(self) -> list[CheckedPiece]:
        """Pieces that the checker may be told to compute now."""
        found: list[CheckedPiece] = []
        while self.waiting and len(self.under_way) < UNDER_WAY:
            found.append(self.waiting.popleft())
            self.under_way[found[-1]] = None
        return found

    def piece_under_way(self, microbatch: int, begin: int) -> CheckedPiece | None:
        """The piece that the checker was asked to compute; None if there is none."""
        return next((p for p in self.under_way if (p.id, p.begin) == (microbatch, begin)), None)

    def computed(self, microbatch: int, begin: int) -> bool:
        """Note that the checker has computed a piece. Returns whether it was asked to."""
        piece = self.piece_under_way(microbatch, begin)
        if piece is None:
            return False
        del self.under_way[piece]
        self.done.add(piece)
        return True

    # ── what others say of it ───────────────────────────────────────────────────────────────────────────────

    def goes(self, piece: CheckedPiece, way: CheckRoute, about: str) -> bool:
        """Note the route of `piece`, and the statements that it makes us wait for; returns whether it is new.

        `about`: the peer that is checked, which is not asked.
        """
        if self.under_way[piece] == way:
            return False
        self.under_way[piece] = way
        for words in (self._awaited, self._spared):
            words -= {word for word in words if word.id == piece.id and word.border in piece[1:]}
        self._awaited |= way.words(piece, about)
        return True

    def spare(self, mute: Callable[[str], bool]) -> None:
        """Stop waiting for statements of `mute` peers."""
        self._spared |= {word for word in self._awaited if mute(word.peer)}
        self._awaited -= self._spared

    def said(
        self, word: AwaitedWord, alike: Iterable[str], differ: Sequence[str], apart: Sequence[float] = ()
    ) -> bool:
        """Note a comparison by `word.peer` with bundles of these peers. Returns whether it was expected."""
        if word not in self._awaited | self._spared:
            return False
        self._awaited.discard(word)
        self._spared.discard(word)
        self._vouchers.update(Accusation(suspect, *word) for suspect in alike)
        found = [Accusation(suspect, *word) for suspect in differ]
        self.accusations.update(found)
        known = apart if len(apart) == len(found) else [math.inf] * len(found)
        self._apart.update(zip(found, known, strict=True))
        return True

    def without(self, rounding: MeasuredRounding) -> CheckerReport:
        """The same report without the accusations that `rounding` explains."""
        explained = {
            one for one in self.accusations if rounding.explains_bundle(one, self._apart.get(one, math.inf))
        }
        return replace(self, accusations=self.accusations - explained, _vouchers=self._vouchers | explained)

    @property
    def finished(self) -> bool:
        """Whether all pieces are computed."""
        return not (self.waiting or self.under_way)

    @property
    def over(self) -> bool:
        """Whether all pieces are computed and all awaited statements are here."""
        return self.finished and not self._awaited

    @property
    def unsaid(self) -> set[AwaitedWord]:
        """Statements that may still come, awaited or not."""
        return self._awaited | self._spared

    @property
    def awaited(self) -> set[Duty]:
        """Duties that may hold the report up; nobody else knows whether bundles arrived."""
        words = {(word.peer, CheckDuty.COMPARES) for word in self._awaited}
        checks = {(self.peer, CheckDuty.CHECKS)} if words else set()
        return words | checks | {duty for way in self.under_way.values() if way for duty in way.duties}

    @property
    def compared(self) -> bool:
        """Whether anybody could compare anything."""
        return bool(self.accusations or self._vouchers)

    def charge(self, suspect: str, *, back: bool) -> Charge | None:
        """Charge against `suspect` by peers with its outputs (`back`: its gradients); None: no accusers.

        A silent peer counts among the peers that could compare, so silence helps no accuser to a majority.
        """
        against = {one.accuser for one in self.accusations if (one.suspect, one.back) == (suspect, back)}
        for_it = {one.accuser for one in self._vouchers if (one.suspect, one.back) == (suspect, back)}
        silent = {word.peer for word in self.unsaid if word.back == back}
        return Charge(frozenset(against), len(against | for_it | silent)) if against else None


def torn(ours: Mapping[Source, m.Given], theirs: Mapping[Source, m.Given]) -> m.Given | None:
    """An input in `ours` that differs from the same input in `theirs`; None if there is none."""
    both = sorted(ours.keys() & theirs.keys())
    return next((ours[one] for one in both if ours[one].digest != theirs[one].digest), None)
