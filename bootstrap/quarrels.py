"""Who cannot add up together: pairs of whom one has spoilt a reduce for the other, or says so falsely (docs/trust.md, "Quarrels in a reduce").

Pure. Nobody decides who of two is right. Neither adds up for the other any more, which ends what the quarrel was about; who has quarrels with several others, and with
most of those who hold the same blocks, has to come back as another. Old quarrels are forgotten: links break, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

REMEMBERED = 100
"""Commits until a quarrel, or a sum that was no number, is forgotten."""
CLOSELY = 20
"""Commits for which votes on a block name what has come from each reducer, after they have differed."""
TIMES = 3
"""Who was turned out so often by most others, because of what it has said or sent, is not let in again."""
OVERFLOW = 3
"""If more than so many have added up something that is no number, it is what they were given."""
MAX_PAIRS = 1 << 14

Pair = frozenset[str]
Known = TypeVar("Known")


class Quarrels:
    """Those of one reign."""

    def __init__(self) -> None:
        self._commits = 0
        self._words: dict[Pair, int] = {}
        """Their words, or what they have sent, are against each other → until which commit."""
        self._delays: dict[Pair, int] = {}
        """One has waited for the other in vain."""
        self._spoilers: dict[str, int] = {}
        """Whose sums were no numbers."""
        self._closely: dict[int, int] = {}
        self._out: Counter[str] = Counter()
        self._shunned: Counter[str] = Counter()

    def committed(self) -> None:
        """One more step, or averaging."""
        self._commits += 1
        self._words = self._remembered(self._words)
        self._delays = self._remembered(self._delays)
        self._spoilers = self._remembered(self._spoilers)
        self._closely = self._remembered(self._closely)

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
        fresh = {pair for pair in pairs if pair not in known}
        if len(known) < MAX_PAIRS:
            known |= dict.fromkeys(pairs, self._commits + REMEMBERED)
        return fresh

    def spoils(self, peer: str) -> None:
        """What it has added up is no number, and everybody says so: others are to reduce."""
        self._spoilers[peer] = self._commits + REMEMBERED

    @property
    def overflow(self) -> bool:
        """Whether so many sums were no numbers that it must be the model's doing."""
        return len(self._spoilers) > OVERFLOW

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

    def is_shunned(self, peer: str, holders: Collection[str], *, late: bool = False) -> bool:
        """Whether `peer`, one of the `holders` of a block, is in quarrel with more than one of the others, and with most of them."""
        known = self._delays if late else self._words
        return self._most(sum(frozenset((peer, other)) in known for other in holders), holders)

    def blamed(self, peers: Iterable[str], accused: str = "") -> str:
        """Who of these, whose words are against each other, has to come back as another: who had to least often, `accused` before others."""
        return min(peers, key=lambda peer: (self._out[peer], peer != accused, peer))

    def turned_out(self, peer: str, *, shunned: bool) -> None:
        """It has to come back as another; `shunned`: as its word is against most others'."""
        self._out[peer] += 1
        self._shunned[peer] += shunned

    def is_done_with(self, peer: str) -> bool:
        """Whether it has spoilt so much that it is not to come back at all."""
        return self._shunned[peer] >= TIMES
