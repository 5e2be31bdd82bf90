"""What one checker has computed once more, what it shows of it, and what others have said of the bundles that came of it (docs/trust.md). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.reputation import CheckDuty, Duty

UNDER_WAY = 2
"""So many microbatches a checker computes once more at a time: they are not in its window."""

Marks = Mapping[m.Where, bytes]
Source = tuple[int, int, bool]
"""What something is computed from: microbatch, the first block of the task, and whether it is the gradient."""


class CheckedPiece(NamedTuple):
    """A microbatch at the blocks [begin, end) of the peer that is checked."""

    id: int
    begin: int
    end: int


class AwaitedWord(NamedTuple):
    """What `peer` is to say of a checker's bundle: of microbatch `id` over `border`, or with `back` of its gradient."""

    peer: str
    id: int
    border: int
    back: bool


class Accusation(NamedTuple):
    """`accuser` has computed from a bundle of `suspect`, and what the checker sends in its place is another."""

    suspect: str
    accuser: str
    id: int
    border: int
    back: bool

    @property
    def pair(self) -> frozenset[str]:
        """One of the two is false, unless the checker is."""
        return frozenset((self.suspect, self.accuser))


class Charge(NamedTuple):
    """Some of those who could compare something say that it is not the same."""

    accusers: frozenset[str]
    of: int
    """So many could."""

    @property
    def may_be_true(self) -> bool:
        """One alone, or the smaller part, may lie."""
        return len(self.accusers) > 1 and 2 * len(self.accusers) > self.of


class CheckRoute(NamedTuple):
    """How a checker comes to compute a piece: `lender` has what enters it, and `after` the gradient of what leaves it, if it does not end in the loss."""

    lender: str
    checker: str
    after: str | None

    @property
    def duties(self) -> set[Duty]:
        """Whom it takes."""
        lends = {(self.lender, CheckDuty.LENDS)} if self.lender != self.checker else set()
        answers = {(self.after, CheckDuty.ANSWERS)} if self.after is not None else set()
        return {(self.checker, CheckDuty.CHECKS), *lends, *answers}

    def words(self, piece: CheckedPiece, about: str) -> set[AwaitedWord]:
        """What is to be said of it. Nobody is asked about itself."""
        back = (
            {AwaitedWord(self.lender, piece.id, piece.begin, back=True)}
            if self.lender != self.checker
            else set()
        )
        out = {AwaitedWord(self.after, piece.id, piece.end, back=False)} if self.after is not None else set()
        return {word for word in back | out if word.peer not in (self.checker, about)}


@dataclass(slots=True)
class CheckerReport:
    """That of one checker."""

    peer: str
    waiting: deque[CheckedPiece] = field(default_factory=deque)
    under_way: dict[CheckedPiece, CheckRoute | None] = field(default_factory=dict)
    done: set[CheckedPiece] = field(default_factory=set)
    marks: Marks | None = None
    given: Mapping[Source, m.Given] = field(default_factory=dict)
    """What it has computed from."""
    accusations: set[Accusation] = field(default_factory=set)
    _vouchers: set[Accusation] = field(default_factory=set)
    """The same of bundles that are alike."""
    _awaited: set[AwaitedWord] = field(default_factory=set)
    _spared: set[AwaitedWord] = field(default_factory=set)
    """Words that are heard if they come, and not waited for."""

    def next(self) -> list[CheckedPiece]:
        """What it may be told to compute now."""
        found: list[CheckedPiece] = []
        while self.waiting and len(self.under_way) < UNDER_WAY:
            found.append(self.waiting.popleft())
            self.under_way[found[-1]] = None
        return found

    def computed(self, microbatch: int, begin: int) -> bool:
        """It says so. Whether it was asked to."""
        piece = next((p for p in self.under_way if (p.id, p.begin) == (microbatch, begin)), None)
        if piece is None:
            return False
        del self.under_way[piece]
        self.done.add(piece)
        return True

    # ── what others say of it ────────────────────────────────────────────────────────────────────────────────────

    def goes(self, piece: CheckedPiece, way: CheckRoute, about: str) -> bool:
        """`piece` is computed like this, and those who have something of it say what they think of `about`. Whether that is new."""
        if self.under_way[piece] == way:
            return False
        self.under_way[piece] = way
        for words in (self._awaited, self._spared):
            words -= {word for word in words if word.id == piece.id and word.border in piece[1:]}
        self._awaited |= way.words(piece, about)
        return True

    def spare(self, mute: Callable[[str], bool]) -> None:
        """Nobody waits for the words of those who are `mute`."""
        self._spared |= {word for word in self._awaited if mute(word.peer)}
        self._awaited -= self._spared

    def said(self, word: AwaitedWord, alike: Iterable[str], differ: Iterable[str]) -> bool:
        """`word.peer` has compared it with what it had of these. Whether that was waited for."""
        if word not in self._awaited | self._spared:
            return False
        self._awaited.discard(word)
        self._spared.discard(word)
        self._vouchers.update(Accusation(suspect, *word) for suspect in alike)
        self.accusations.update(Accusation(suspect, *word) for suspect in differ)
        return True

    @property
    def finished(self) -> bool:
        """Whether all is computed."""
        return not (self.waiting or self.under_way)

    @property
    def over(self) -> bool:
        """Whether all is done, and said by those who are waited for."""
        return self.finished and not self._awaited

    @property
    def unsaid(self) -> set[AwaitedWord]:
        """What could still be said, waited for or not."""
        return self._awaited | self._spared

    @property
    def awaited(self) -> set[Duty]:
        """Who may hold it up: whether a checker has got what it needs, and others have got what it has made of that, nobody else knows."""
        words = {(word.peer, CheckDuty.COMPARES) for word in self._awaited}
        checks = {(self.peer, CheckDuty.CHECKS)} if words else set()
        return words | checks | {duty for way in self.under_way.values() if way for duty in way.duties}

    @property
    def compared(self) -> bool:
        """Whether anybody had anything to compare."""
        return bool(self.accusations or self._vouchers)

    def charge(self, suspect: str, *, back: bool) -> Charge | None:
        """What those say who have had outputs of `suspect`, or gradients. Who could say something and has not accuses nobody: its silence does not make others most."""
        against = {one.accuser for one in self.accusations if (one.suspect, one.back) == (suspect, back)}
        for_it = {one.accuser for one in self._vouchers if (one.suspect, one.back) == (suspect, back)}
        silent = {word.peer for word in self.unsaid if word.back == back}
        return Charge(frozenset(against), len(against | for_it | silent)) if against else None


def torn(ours: Mapping[Source, m.Given], theirs: Mapping[Source, m.Given]) -> m.Given | None:
    """What was given to us for something, where they have computed the same from something else."""
    both = sorted(ours.keys() & theirs.keys())
    return next((ours[one] for one in both if ours[one].digest != theirs[one].digest), None)
