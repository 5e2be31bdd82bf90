"""One spot check: what a holder counts in a step is computed once more by another, and the fingerprints are compared (docs/trust.md).

Pure. Who is lent what, when, and what follows from a verdict is spotchecks.py's business.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.standing import Duty, Part

UNDER_WAY = 2
"""So many microbatches a checker computes once more at a time: they are not in its window."""

Distance = Callable[[bytes, bytes], float]
Place = tuple[int, int, int, bytes]
"""Of a fingerprint: block, elements [begin, end), key."""
Marks = Mapping[Place, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRules:
    """What the manifest says of them. `draw`: a number in [0, 1) that nobody can foresee."""

    share: float = 0.0
    """Of contributions that are checked."""
    tolerance: float = 1e-3
    """Relative distance of two honest sums, at most."""
    draw: Callable[[], float]
    distance: Distance


class Piece(NamedTuple):
    """A microbatch at the blocks [begin, end) of the peer that is checked."""

    id: int
    begin: int
    end: int


class Verdict(enum.Enum):
    """What has come of a check, or that it goes on."""

    OPEN = "open"
    PASSED = "passed"
    CONVICTED = "convicted"
    DISPUTED = "disputed"
    LAPSED = "lapsed"


@dataclass(slots=True)
class Opinion:
    """What one checker has computed, and what it shows of that."""

    peer: str
    waiting: deque[Piece] = field(default_factory=deque)
    under_way: set[Piece] = field(default_factory=set)
    done: set[Piece] = field(default_factory=set)
    marks: Marks | None = None

    def next(self) -> list[Piece]:
        """What it may be told to compute now."""
        found: list[Piece] = []
        while self.waiting and len(self.under_way) < UNDER_WAY:
            found.append(self.waiting.popleft())
            self.under_way.add(found[-1])
        return found


class SpotCheck:
    """Of `peer`, by `checker` first; `number` names it in its step."""

    def __init__(self, number: int, peer: str, checker: str) -> None:
        self.number = number
        self.peer = peer
        self.opinions = [Opinion(checker)]
        self.verdict = Verdict.OPEN
        self.culprit = ""
        """Who is convicted; of a dispute whoever stands against `peer`."""
        self.pieces: list[Piece] = []
        """All that `peer` counts, as far as it has been accepted."""
        self.took_part: set[Duty] = set()
        """Who was asked for something."""
        self._plan = 0
        """Under which all is shown."""
        self._asked: set[str] = set()
        self._received: dict[str, tuple[m.Mark, ...]] = {}
        """Reducer → what it had from `peer`."""

    def __repr__(self) -> str:
        by = ", ".join(opinion.peer[-6:] for opinion in self.opinions)
        return f"<spot check {self.number} of {self.peer[-6:]} by {by}: {self.verdict.value}>"

    @property
    def open(self) -> bool:
        return self.verdict is Verdict.OPEN

    @property
    def blocks(self) -> set[int]:
        """At which `peer` counts something."""
        return {block for piece in self.pieces for block in range(piece.begin, piece.end)}

    @property
    def checkers(self) -> list[str]:
        return [opinion.peer for opinion in self.opinions]

    def end(self, verdict: Verdict, culprit: str = "") -> None:
        """It is over."""
        self.verdict, self.culprit = verdict, culprit

    # ── computed once more ───────────────────────────────────────────────────────────────────────────────────────

    def accepted(self, pieces: Iterable[Piece]) -> None:
        """`peer` counts these, too."""
        new = list(pieces)
        self.pieces += new
        for opinion in self.opinions:
            opinion.waiting.extend(new)

    def third(self, checker: str) -> None:
        """Two differ: `checker` is to decide."""
        self.opinions.append(Opinion(checker, deque(self.pieces)))
        self.void()

    def done(self, checker: str, microbatch: int, begin: int) -> bool:
        """`checker` has computed one of them. Whether it was asked to."""
        opinion = next((opinion for opinion in self.opinions if opinion.peer == checker), None)
        if opinion is None:
            return False
        piece = next((p for p in opinion.under_way if (p.id, p.begin) == (microbatch, begin)), None)
        if piece is None:
            return False
        opinion.under_way.remove(piece)
        opinion.done.add(piece)
        return True

    @property
    def computed(self) -> bool:
        """Whether all who check have done all of it."""
        return all(opinion.done == set(self.pieces) for opinion in self.opinions)

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

    # ── compared ─────────────────────────────────────────────────────────────────────────────────────────────────

    def void(self) -> None:
        """There is another plan, or another opinion to be heard: everything is to be shown once more."""
        self._asked.clear()
        self._received.clear()
        for opinion in self.opinions:
            opinion.marks = None

    def ask(self, plan: int, reducers: Iterable[str]) -> list[str]:
        """All have computed: these of `reducers` are to show what they have received under `plan`."""
        self._plan = plan
        self._asked = {peer for peer in reducers if peer != self.peer}
        self.took_part |= {(peer, Part.SHOWS) for peer in self._asked}
        return sorted(self._asked)

    def is_under(self, plan: int) -> bool:
        """Whether what is shown under `plan` is what was asked for: it may come late, of a plan that is void."""
        return self.asks and plan == self._plan

    @property
    def asks(self) -> bool:
        """Whether reducers have been asked."""
        return bool(self._asked)

    def received(self, reducer: str, marks: tuple[m.Mark, ...]) -> tuple[m.Mark, ...] | None:
        """`reducer` shows its fingerprints. When all have, what the checkers are to show; None before."""
        if reducer not in self._asked or reducer in self._received:
            return None
        self._received[reducer] = marks
        if self._received.keys() != self._asked:
            return None
        return tuple(
            mark.model_copy(update={"values": b""}) for own in self._received.values() for mark in own
        )

    def shown(self, checker: str, marks: Iterable[m.Mark]) -> None:
        """`checker` shows its own."""
        for opinion in self.opinions:
            if opinion.peer == checker and self._received.keys() == self._asked:
                opinion.marks = {_place(mark): mark.values for mark in marks}

    @property
    def silent(self) -> set[Duty]:
        """Who has not shown what it was asked for."""
        reducers = self._asked - self._received.keys()
        checkers = {opinion.peer for opinion in self.opinions if opinion.marks is None}
        return {(peer, Part.SHOWS) for peer in reducers or checkers}

    @property
    def complete(self) -> bool:
        """Whether everything is shown."""
        return self.asks and all(opinion.marks is not None for opinion in self.opinions)

    def judge(self, tolerance: float, distance: Distance) -> Verdict:
        """What follows from what was shown. OPEN: two differ, and a third is to be heard.

        What was received of `peer` is the reducers' word: where it is one of them alone that differs, it may be that one's fault, and nobody is
        convicted.
        """
        theirs = {
            reducer: {_place(mark): mark.values for mark in own} for reducer, own in self._received.items()
        }
        everything = {place: values for own in theirs.values() for place, values in own.items()}

        def alike(one: Marks, other: Marks, places: Iterable[Place]) -> bool:
            both = ((other.get(place, b""), one.get(place, b"")) for place in places)
            return all(distance(mine, yours) <= tolerance for mine, yours in both)

        first, *more = [opinion.marks or {} for opinion in self.opinions]
        differ = [reducer for reducer, own in theirs.items() if not alike(own, first, own)]
        if not everything:
            self.end(Verdict.LAPSED)  # it has sent nothing to anybody else
        elif not differ:
            self.end(Verdict.PASSED)
        elif len(differ) == 1 < sum(map(bool, theirs.values())):
            self.end(Verdict.DISPUTED, differ[0])
        elif not more:
            return Verdict.OPEN
        elif alike(everything, more[0], everything):
            self.end(Verdict.CONVICTED, self.opinions[0].peer)
        elif len(differ) > 1 and alike(first, more[0], everything):
            self.end(Verdict.CONVICTED, self.peer)
        else:
            self.end(Verdict.DISPUTED, self.opinions[0].peer)
        return self.verdict


def _place(mark: m.Mark) -> Place:
    return mark.block, mark.begin, mark.end, mark.key
