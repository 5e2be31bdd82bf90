"""Who cannot add up together: pairs of whom one has spoilt a reduce for the other, or says so falsely (docs/trust.md, "Quarrels in a reduce").

Pure. Nobody decides who of two is right. Neither adds up for the other any more, which ends what the quarrel was about; who has quarrels with several others, and with
most of those who hold the same blocks, has to come back as another. Old quarrels are forgotten: links break, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

REMEMBERED = 100
"""Commits until a quarrel, or a sum that was no number, is forgotten."""
CLOSELY = 20
"""Commits for which votes on a block name what has come from each reducer, after they have differed."""
TIMES = 3
"""Who was turned out so often by most others, because of what it has said or sent, is not let in again."""
LONGEST = 6
"""Who was waited for in vain rests for two commits, four, and so on, at most 64."""
MAX_PAIRS = 1 << 14

Pair = frozenset[str]
Known = TypeVar("Known")


@dataclass(slots=True)
class Conduct:
    """How often peers had to go, wherever they come back."""

    vain: Counter[str] = field(default_factory=Counter)
    """As others had waited for them."""
    out: Counter[str] = field(default_factory=Counter)
    """For another reason."""
    shunned: Counter[str] = field(default_factory=Counter)
    """That was because most others' words were against theirs."""

    def fade(self) -> None:
        """Who was waited for long ago is forgiven half of it."""
        self.vain = Counter({peer: times // 2 for peer, times in self.vain.items() if times > 1})


class DisputedPairs:
    """Those of one reign; in a run of several clusters those of one of them, and `conduct` is that of all."""

    def __init__(self, conduct: Conduct | None = None) -> None:
        self._commits = 0
        self._words: dict[Pair, int] = {}
        """Their words, or what they have sent, are against each other → until which commit."""
        self._delays: dict[Pair, int] = {}
        """One has waited for the other in vain."""
        self._spoilers: dict[str, int] = {}
        """Whose sums were no numbers."""
        self._closely: dict[int, int] = {}
        self._rests: dict[str, int] = {}
        self._conduct = Conduct() if conduct is None else conduct

    def committed(self) -> None:
        """One more step, or averaging."""
        self._commits += 1
        self._words = self._remembered(self._words)
        self._delays = self._remembered(self._delays)
        self._spoilers = self._remembered(self._spoilers)
        self._closely = self._remembered(self._closely)
        self._rests = self._remembered(self._rests)
        if self._commits % REMEMBERED == 0:
            self._conduct.fade()

    def _remembered(self, known: Mapping[Known, int]) -> dict[Known, int]:
        return {one: until for one, until in known.items() if until > self._commits}

    # ── how closely votes are looked at ──────────────────────────────────────────────────────────────────────────

    def look_closely(self, blocks: Iterable[int]) -> None:
        """Votes on these have differed, or were on something that is no number."""
        self._closely |= dict.fromkeys(blocks, self._commits + CLOSELY)

    def closely(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Those of `blocks` of which votes are to name what has come from each reducer."""
        return tuple(block for block in sorted(blocks) if block in self._closely)

    # ── who with whom ────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, pairs: Collection[Pair], *, late: bool = False) -> set[Pair]:
        """These two and two are in quarrel; `late`: one has waited for the other. Returns those of whom that is new."""
        known = self._delays if late else self._words
        fresh = sorted(map(sorted, (pair for pair in pairs if pair not in known)))[: MAX_PAIRS - len(known)]
        known |= {frozenset(pair): self._commits + REMEMBERED for pair in fresh}
        return set(map(frozenset, fresh))

    def spoils(self, peer: str) -> None:
        """What it has added up is no number, and everybody says so: others are to reduce."""
        self._spoilers[peer] = self._commits + REMEMBERED

    def have_all_spoilt(self, holders: Collection[str]) -> bool:
        """Whether all of several holders have added up something that is no number: it must be the model's doing."""
        return len(holders) > 1 and self._spoilers.keys() >= set(holders)

    def fit(self, peers: Sequence[str], others: Collection[str]) -> tuple[str, ...]:
        """Who of `peers` may add up what `others`, they among them, send, and give it to them. What those say who are in quarrel with most does not count
        against the rest.
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
        """Whether so many of `others`, of whom the one in question is one, are more than one and most of the rest."""
        return against > 1 and 2 * against > len(others) - 1

    # ── who has to go ────────────────────────────────────────────────────────────────────────────────────────────

    def shunned(self, holders: Collection[str], *, late: bool = False) -> set[str]:
        """Which of the `holders` of a block are in quarrel with more than one of the others, and with most of them."""
        known, there = self._delays if late else self._words, set(holders)
        against = Counter(peer for pair in known if pair <= there for peer in pair)
        return {peer for peer, others in against.items() if self._most(others, there)}

    def blamed(self, peers: Iterable[str], accused: str = "") -> str:
        """Who of these, whose words are against each other, has to come back as another: who is in quarrel with most others, then who had to least often,
        `accused` before others.
        """
        against = Counter(peer for pair in self._words for peer in pair)
        return min(peers, key=lambda peer: (-against[peer], self._conduct.out[peer], peer != accused, peer))

    def turned_out(self, peer: str, *, shunned: bool) -> None:
        """It has to come back as another; `shunned`: as its word is against most others'."""
        self._conduct.out[peer] += 1
        self._conduct.shunned[peer] += shunned

    def waited_in_vain(self, peers: Iterable[str]) -> None:
        """Others had waited for these, or counted on them: they rest, the longer the oftener that was."""
        for peer in peers:
            self._conduct.vain[peer] += 1
            self._rests[peer] = self._commits + 2 ** min(self._conduct.vain[peer], LONGEST)

    def rests(self, peer: str) -> bool:
        """Whether the others had better go on without `peer`, if they can."""
        return peer in self._rests

    def is_fickle(self, peer: str) -> bool:
        """Whether others have waited for it so often that somebody else is to be found."""
        return self._conduct.vain[peer] >= TIMES

    def is_done_with(self, peer: str) -> bool:
        """Whether it has spoilt so much that it is not to come back at all."""
        return self._conduct.shunned[peer] >= TIMES
