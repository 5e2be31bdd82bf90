"""Whose words are against each other when holders of a block have voted differently on its sum (docs/trust.md, "Disputes in a reduce"). Pure.

A vote that is looked at closely names what has come from each reducer; one of an older version does not. Where two name different things, either the reducer has sent
them different things, or one of them says something false.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from itertools import combinations

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import Pair

ALIKE = 1e-6
"""Norms of the same bits, as different processors add them."""

Source = tuple[int, str]
"""A block, and who has added it up."""


def same_bits(one: m.BlockVote, other: m.BlockVote) -> bool:
    """Whether two votes are on the same bits. One that lies about the norm alone would scale everybody's update."""
    same = (one.digest, one.finite) == (other.digest, other.finite)
    return same and math.isclose(one.squared_norm, other.squared_norm, rel_tol=ALIKE)


def quarrels(votes: Mapping[str, m.Vote], block: int) -> set[Pair]:
    """Pairs whose words are against each other, after votes on `block` that differ."""
    words = {peer: _received(vote, block) for peer, vote in votes.items()}
    found: set[Pair] = set()
    for source in {source for word in words.values() for source in word}:
        found |= _apart(source[1], {peer: word[source] for peer, word in words.items() if source in word})
    return found or _among(
        {peer: one for peer, vote in votes.items() if (one := _on(vote, block)) is not None}
    )


def spoilers(votes: Mapping[str, m.Vote], block: int, reducers: Collection[str]) -> set[str]:
    """Which of the `reducers` of `block`, and of what is tied to it, have added up something that is no number, as most of its holders say."""
    words = [word for vote in votes.values() if (word := _received(vote, block))]
    against = Counter(reducer for word in words for (_, reducer), (_, finite) in word.items() if not finite)
    return {reducer for reducer in reducers if 2 * against[reducer] > len(words)}


def _on(vote: m.Vote, block: int) -> m.BlockVote | None:
    return next((one for one in vote.blocks if one.block == block), None)


def _received(vote: m.Vote, block: int) -> dict[Source, tuple[str, bool]]:
    return {(one.of, one.reducer): (one.digest, one.finite) for one in vote.received if one.block == block}


def _apart(reducer: str, words: Mapping[str, Hashable]) -> set[Pair]:
    """`words`: what each has from `reducer`, who has it from itself, if it holds the block, too. Else most of them decide, and if there are not more of one kind, nobody."""
    usual = words.get(reducer)
    if usual is None:
        (usual, most), *others = Counter(words.values()).most_common(2)
        usual = None if others and others[0][1] == most else usual
    return {frozenset((reducer, peer)) for peer, word in words.items() if word != usual and peer != reducer}


def _among(votes: Mapping[str, m.BlockVote]) -> set[Pair]:
    """As far as they say they have the same from everybody, and make something else of it."""
    return {
        frozenset((one, other))
        for (one, mine), (other, theirs) in combinations(sorted(votes.items()), 2)
        if not same_bits(mine, theirs)
    }
