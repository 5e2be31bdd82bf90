"""What the state of each block is, where its holders say different things of it (docs/trust.md, "Agreement on states").

Pure. An update is the same for everybody who has voted on it, and who took part in the step makes it himself: these are the witnesses of a version, and the word of most
of them counts, whoever speaks first. Whoever has come since has a copy of what somebody gave him, and is no witness, unless there is no other. What a checkpoint
says is settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.volunteer import LifeCycle, Volunteer


@dataclass(frozen=True, slots=True)
class Differing:
    """Who says something else than counts, and who of them has made it himself; else a block of which nothing counts, with the witnesses who say different things."""

    wrong: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()
    torn: tuple[int, frozenset[str]] | None = None


NOTHING = Differing()


@dataclass(slots=True)
class _Words:
    """On a block: what its ready holders have said, and whose word counts; of those, who has not spoken."""

    said: dict[str, str] = field(default_factory=dict)
    witnesses: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)


class StateAgreement:
    """On the version that holds now; the words themselves are the volunteers' (`Volunteer.digests`)."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._open: set[int] = set()
        """Blocks of which different things were said."""

    def hear(self, volunteer: Volunteer, held: Sequence[m.Held]) -> None:
        """`volunteer` says what it holds of the current version."""
        volunteer.digests = {one.block: one.digest for one in held}
        for other in self._context.members.volunteers.values():
            if other.life_cycle is LifeCycle.READY:
                self._compare(volunteer.digests, other.digests)
        self._compare(volunteer.digests, self._context.sealed)

    def _compare(self, mine: Mapping[int, str], theirs: Mapping[int, str]) -> None:
        self._open.update(block for block in mine.keys() & theirs.keys() if mine[block] != theirs[block])

    def judge(self, *, last: bool = False) -> Differing:
        """What is to be said of the blocks in question by now; `last`: nobody who is silent is waited for any more."""
        wrong: set[str] = set()
        made: set[str] = set()
        for block in sorted(self._open):
            words = self._words(block)
            right = self._right(block, words, last=last)
            if right is None and words.silent and not last:
                continue
            self._open.discard(block)
            if right is None and len(set(words.said.values())) > 1:
                torn = words.witnesses & words.said.keys()
                return Differing(torn=(block, frozenset(torn or words.said)))
            false = {peer for peer, digest in words.said.items() if digest != right}
            wrong |= false
            made |= false & words.witnesses
        return Differing(frozenset(wrong), frozenset(made)) if wrong else NOTHING

    def settled(self, block: int, *, last: bool = False) -> str | None:
        """The digest of the state of `block`, as soon as it is certain; `last` as in `judge`."""
        return self._right(block, self._words(block), last=last)

    def _words(self, block: int) -> _Words:
        found = _Words()
        for volunteer in self._context.members.volunteers.values():
            begin, end = volunteer.place or (0, 0)
            if volunteer.life_cycle is not LifeCycle.READY or not begin <= block < end:
                continue
            if block in volunteer.digests:
                found.said[volunteer.peer] = volunteer.digests[block]
            elif volunteer.witness:
                found.silent.add(volunteer.peer)
            if volunteer.witness:
                found.witnesses.add(volunteer.peer)
        return found

    def _right(self, block: int, words: _Words, *, last: bool) -> str | None:
        """What most witnesses say, or all who have spoken, if there are none."""
        if block in self._context.sealed:
            return self._context.sealed[block]
        heard = Counter(words.said[peer] for peer in words.witnesses & words.said.keys())
        voters = heard.total() if last else len(words.witnesses)
        if not voters:
            heard = Counter(words.said.values())
            voters = heard.total()
        ((right, times),) = heard.most_common(1) or [("", 0)]
        return right if 2 * times > voters else None
