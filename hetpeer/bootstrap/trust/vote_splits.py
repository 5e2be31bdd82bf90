"""Contradicting peers after holders of a block voted differently on its sum (docs/trust.md). Pure.

A detailed vote lists what came from each reducer; a vote of an older version does not. If two votes list
different things, either the reducer sent different things or one of the voters makes a false statement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from itertools import combinations

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import Pair

ALIKE = 1e-6
"""Relative difference of norms of the same bits, as different processors add them."""

Source = tuple[int, str]
"""A block and its reducer."""


def same_bits(one: m.BlockVote, other: m.BlockVote) -> bool:
    """Whether two votes are on the same bits; a false norm alone would scale everybody's update."""
    same = (one.digest, one.finite) == (other.digest, other.finite)
    return same and math.isclose(one.squared_norm, other.squared_norm, rel_tol=ALIKE)


def disputes(votes: Mapping[str, m.Vote], block: int) -> set[Pair]:
    """Contradicting pairs after differing votes on `block`."""
    words = {peer: _received(vote, block) for peer, vote in votes.items()}
    found: set[Pair] = set()
    for source in {source for word in words.values() for source in word}:
        found |= _apart(source[1], {peer: word[source] for peer, word in words.items() if source in word})
    return found or _among(
        {peer: one for peer, vote in votes.items() if (one := _on(vote, block)) is not None}
    )


def spoilers(votes: Mapping[str, m.Vote], block: int, reducers: Collection[str]) -> set[str]:
    """Reducers of `block` and of tied blocks whose sum is not finite, by the majority of its holders."""
    words = [word for vote in votes.values() if (word := _received(vote, block))]
    against = Counter(reducer for word in words for (_, reducer), (_, finite) in word.items() if not finite)
    return {reducer for reducer in reducers if 2 * against[reducer] > len(words)}


def _on(vote: m.Vote, block: int) -> m.BlockVote | None:
    return next((one for one in vote.blocks if one.block == block), None)


def _received(vote: m.Vote, block: int) -> dict[Source, tuple[str, bool]]:
    return {(one.of, one.reducer): (one.digest, one.finite) for one in vote.received if one.block == block}


def _apart(reducer: str, words: Mapping[str, Hashable]) -> set[Pair]:
    """Contradicting pairs by `words`: holder → what it received from `reducer`.

    The reducer's own statement decides if it holds the block; otherwise the majority does, if there is one.
    """
    usual = words.get(reducer)
    if usual is None:
        (usual, most), *others = Counter(words.values()).most_common(2)
        usual = None if others and others[0][1] == most else usual
    return {frozenset((reducer, peer)) for peer, word in words.items() if word != usual and peer != reducer}


def _among(votes: Mapping[str, m.BlockVote]) -> set[Pair]:
    """Contradicting pairs among voters that received the same from everybody but computed different sums."""
    return {
        frozenset((one, other))
        for (one, mine), (other, theirs) in combinations(sorted(votes.items()), 2)
        if not same_bits(mine, theirs)
    }
