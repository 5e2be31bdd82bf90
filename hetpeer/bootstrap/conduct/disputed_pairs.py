"""Disputed pairs: one of the two has spoilt a reduce for the other, or says so falsely (docs/trust.md).

Pure. Nobody decides which of the two is right. Neither reduces for the other any more, which ends the
dispute. A peer in dispute with several others, and with most holders of the same blocks, is fenced and may
return as a new incarnation. Old disputes expire, since links break, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

REMEMBERED = 100
"""Commits until a dispute, or a sum that was not finite, is forgotten."""
CLOSELY = 20
"""Commits for which votes on a block list what each reducer sent, after votes on it differed."""
TIMES = 3
"""A peer that most others caused to be fenced so often is not admitted again."""
LONGEST = 6
"""A peer that others waited for in vain rests for 2, 4, 8, … commits: at most 2**LONGEST."""
SHUNNED_REST = 16
"""Commits for which a peer rests that most others caused to be fenced; the second time for twice as many."""
MAX_PAIRS = 1 << 14

Pair = frozenset[str]
Known = TypeVar("Known")


@dataclass(slots=True)
class Conduct:
    """Misconduct of each peer, over all clusters and incarnations."""

    vain: Counter[str] = field(default_factory=Counter)
    """Number of times others waited for the peer in vain; fades."""
    fenced: Counter[str] = field(default_factory=Counter)
    """Number of times the peer was fenced."""
    shunned: Counter[str] = field(default_factory=Counter)
    """Number of those times at which most others' statements contradicted the peer's."""

    def fade(self) -> None:
        """Halve the counts of vain waits."""
        self.vain = Counter({peer: times // 2 for peer, times in self.vain.items() if times > 1})


class DisputedPairs:
    """Disputed pairs in one term, in a grouped run of one cluster; `conduct` is shared by all clusters."""

    def __init__(self, conduct: Conduct | None = None) -> None:
        self._commits = 0
        self._words: dict[Pair, int] = {}
        """Pairs with contradicting statements or data → last commit for which that counts."""
        self._delays: dict[Pair, int] = {}
        """Pairs of which one waited for the other in vain."""
        self._spoilers: dict[str, int] = {}
        """Peers whose sums were not finite."""
        self._closely: dict[int, int] = {}
        self.resting: dict[str, int] = {}
        """Peers without which steps should go on if possible → the commit at which that ends."""
        self._conduct = Conduct() if conduct is None else conduct

    def committed(self) -> None:
        """Note a committed step or averaging; old entries expire."""
        self._commits += 1
        self._words = self._unexpired(self._words)
        self._delays = self._unexpired(self._delays)
        self._spoilers = self._unexpired(self._spoilers)
        self._closely = self._unexpired(self._closely)
        self.resting = self._unexpired(self.resting)
        if self._commits % REMEMBERED == 0:
            self._conduct.fade()

    def _unexpired(self, known: Mapping[Known, int]) -> dict[Known, int]:
        """Entries of `known` (value: their last commit) that still count."""
        return {one: until for one, until in known.items() if until > self._commits}

    # ── how closely votes are looked at ─────────────────────────────────────────────────────────────────────

    def look_closely(self, blocks: Iterable[int]) -> None:
        """Note that votes on `blocks` differed or were on sums that are not finite."""
        self._closely |= dict.fromkeys(blocks, self._commits + CLOSELY)

    def closely(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Blocks among `blocks` whose votes must list what each reducer sent."""
        return tuple(block for block in sorted(blocks) if block in self._closely)

    # ── who with whom ───────────────────────────────────────────────────────────────────────────────────────

    def add(self, pairs: Collection[Pair], *, late: bool = False) -> set[Pair]:
        """Note disputed `pairs`; `late`: one waited for the other. Returns the pairs that are new."""
        known = self._delays if late else self._words
        fresh = sorted(map(sorted, (pair for pair in pairs if pair not in known)))[: MAX_PAIRS - len(known)]
        known |= {frozenset(pair): self._commits + REMEMBERED for pair in fresh}
        return set(map(frozenset, fresh))

    def spoils(self, peer: str) -> None:
        """Note that a sum by `peer` is not finite, by everybody's statement: others must reduce."""
        self._spoilers[peer] = self._commits + REMEMBERED

    def have_all_spoilt(self, holders: Collection[str]) -> bool:
        """Whether all of several holders produced sums that are not finite: then the model is the cause."""
        return len(holders) > 1 and self._spoilers.keys() >= set(holders)

    def fit(self, peers: Sequence[str], others: Collection[str]) -> tuple[str, ...]:
        """Peers among `peers` that may reduce for `others`, which include `peers`.

        Disputes of a peer that is in dispute with most others do not count against the rest.
        """
        there = set(others)
        pairs = [pair for pair in self._words.keys() | self._delays.keys() if pair <= there]
        against = Counter(peer for pair in pairs for peer in pair)
        heard = {peer for peer in there if not self._most(against[peer], there)}
        apart = {peer for pair in pairs if pair <= heard for peer in pair}
        fit = heard - apart - self._spoilers.keys()
        return tuple(peer for peer in peers if peer in fit)

    @staticmethod
    def _most(against: int, others: Collection[str]) -> bool:
        """Whether `against` is more than one and a majority of `others` without the peer itself."""
        return against > 1 and 2 * against > len(others) - 1

    # ── who has to go ───────────────────────────────────────────────────────────────────────────────────────

    def shunned(self, holders: Collection[str], *, late: bool = False) -> set[str]:
        """Holders among a block's `holders` in dispute with more than one other, and with most of them."""
        known, there = self._delays if late else self._words, set(holders)
        against = Counter(peer for pair in known if pair <= there for peer in pair)
        return {peer for peer, others in against.items() if self._most(others, there)}

    def blamed(self, peers: Iterable[str], accused: str = "") -> str:
        """Contradicting peer to fence: most disputes first, then least often fenced, then `accused`."""
        against = Counter(peer for pair in self._words for peer in pair)
        fenced = self._conduct.fenced
        return min(peers, key=lambda peer: (-against[peer], fenced[peer], peer != accused, peer))

    def fenced(self, peer: str, *, shunned: bool) -> None:
        """Note that `peer` is fenced; `shunned`: because its statements are against most others'.

        Then it rests, or it would spoil the very next reduce, too.
        """
        self._conduct.fenced[peer] += 1
        if shunned:
            self._conduct.shunned[peer] += 1
            self._rest(peer, SHUNNED_REST * 2 ** (self._conduct.shunned[peer] - 1))

    def waited_in_vain(self, peers: Iterable[str]) -> None:
        """Note that others waited for `peers` in vain: they rest, longer each time."""
        for peer in peers:
            self._conduct.vain[peer] += 1
            self._rest(peer, 2 ** min(self._conduct.vain[peer], LONGEST))

    def _rest(self, peer: str, commits: int) -> None:
        """Let `peer` rest for at least so many commits from now on."""
        self.resting[peer] = max(self._commits + commits, self.resting.get(peer, 0))

    def is_fickle(self, peer: str) -> bool:
        """Whether others waited for `peer` so often that it should be replaced."""
        return self._conduct.vain[peer] >= TIMES

    def is_done_with(self, peer: str) -> bool:
        """Whether `peer` is excluded for good."""
        return self._conduct.shunned[peer] >= TIMES
