"""Agreement on the state of each block when its holders report different digests (docs/trust.md). Pure.

Every participant of a step applies the same update itself. These participants are the witnesses of the
version, and their majority counts. A volunteer that joined later has a copy from somebody else and is no
witness, unless there is no other. The digest in a checkpoint is final.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState


@dataclass(frozen=True, slots=True)
class Differing:
    """Volunteers with a `wrong` state, those that `made` it themselves, or a `torn` block: no majority.

    `torn` is (block, witnesses that report different digests).
    """

    wrong: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()
    torn: tuple[int, frozenset[str]] | None = None


NOTHING = Differing()


@dataclass(slots=True)
class _Words:
    """Reports on a block: volunteer → digest, the witnesses, and the witnesses without a report."""

    said: dict[str, str] = field(default_factory=dict)
    witnesses: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)


class StateAgreement:
    """Agreement on the current version; the reports themselves are in `Volunteer.digests`."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._open: set[int] = set()
        """Blocks with different reports."""

    def hear(self, volunteer: VolunteerState, held: Sequence[m.Held]) -> None:
        """Note the states that `volunteer` holds of the current version."""
        volunteer.digests = {one.block: one.digest for one in held}
        for other in self._context.members.volunteers.values():
            if other.life_cycle is LifeCycle.READY:
                self._compare(volunteer.digests, other.digests)
        self._compare(volunteer.digests, self._context.history.digests)

    def _compare(self, mine: Mapping[int, str], theirs: Mapping[int, str]) -> None:
        self._open.update(block for block in mine.keys() & theirs.keys() if mine[block] != theirs[block])

    def judge(self, *, last: bool = False) -> Differing:
        """Result for the blocks in question; `last`: do not wait for silent witnesses any more."""
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
        """Digest of the state of `block` once it is certain, else None; `last` as in `judge`."""
        return self._right(block, self._words(block), last=last)

    def _words(self, block: int) -> _Words:
        """Holders' statements on their state of `block`, and the witnesses that have made none."""
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
        """Digest by the majority of witnesses, or of all reports without a witness; None if undecided."""
        if block in self._context.history.digests:
            return self._context.history.digests[block]
        heard = Counter(words.said[peer] for peer in words.witnesses & words.said.keys())
        voters = heard.total() if last else len(words.witnesses)
        if not voters:
            heard = Counter(words.said.values())
            voters = heard.total()
        ((right, times),) = heard.most_common(1) or [("", 0)]
        return right if 2 * times > voters else None
