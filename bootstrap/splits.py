"""Whose words are against each other when holders of a block have voted differently on its sum (docs/trust.md, "Quarrels in a reduce"). Pure.

A vote that is looked at closely names what has come from each reducer. Where two name different things, either the reducer has sent them different things, or
one of them says something false.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import combinations

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.quarrels import Pair

ALIKE = 1e-6
"""Norms of the same bits, as different processors add them."""

Source = tuple[int, str]
"""A block, and who has added it up."""


def same_bits(one: m.BlockVote, other: m.BlockVote) -> bool:
    """Whether two votes are on the same bits. One that lies about the norm alone would scale everybody's update."""
    same = (one.digest, one.finite) == (other.digest, other.finite)
    return same and math.isclose(one.squared_norm, other.squared_norm, rel_tol=ALIKE)


def is_close(vote: m.Vote, closely: Collection[int], reducers: Mapping[int, Iterable[str]]) -> bool:
    """Whether `vote` names, of each block of it that is looked at `closely`, what has come from all of its `reducers`."""
    named = {(one.block, one.of, one.reducer) for one in vote.received}
    blocks = {one.block for one in vote.blocks}.intersection(closely)
    return all((block, block, reducer) in named for block in blocks for reducer in reducers[block])


def quarrels(votes: Mapping[str, m.Vote], block: int) -> set[Pair]:
    """Pairs whose words are against each other, after votes on `block` that differ."""
    words = {peer: _received(vote, block) for peer, vote in votes.items() if _on(vote, block)}
    sources = {source for word in words.values() for source in word}
    found: set[Pair] = set()
    for source in sources:
        found |= _apart(source[1], {peer: word.get(source) for peer, word in words.items()})
    return found or _among({peer: vote for peer in words if (vote := _on(votes[peer], block)) is not None})


def spoilers(votes: Mapping[str, m.Vote], block: int) -> set[str]:
    """Who has added up something of `block`, or of what is tied to it, that is no number, as half of its holders say, or more."""
    words = [_received(vote, block) for vote in votes.values() if _on(vote, block) is not None]
    against = Counter(reducer for word in words for (_, reducer), (_, finite) in word.items() if not finite)
    return {reducer for reducer, said in against.items() if 2 * said >= len(words)}


def _on(vote: m.Vote, block: int) -> m.BlockVote | None:
    return next((one for one in vote.blocks if one.block == block), None)


def _received(vote: m.Vote, block: int) -> dict[Source, tuple[str, bool]]:
    return {(one.of, one.reducer): (one.digest, one.finite) for one in vote.received if one.block == block}


def _apart(reducer: str, words: Mapping[str, Hashable]) -> set[Pair]:
    """`words`: what each has from `reducer`, who has it from itself, if it holds the block, too."""
    usual = (
        words.get(reducer)
        or max(sorted(Counter(words.values()).items(), key=repr), key=lambda one: one[1])[0]
    )
    return {frozenset((reducer, peer)) for peer, word in words.items() if word != usual and peer != reducer}


def _among(votes: Mapping[str, m.BlockVote]) -> set[Pair]:
    """All have the same from everybody, and make something else of it."""
    return {
        frozenset((one, other))
        for (one, mine), (other, theirs) in combinations(sorted(votes.items()), 2)
        if not same_bits(mine, theirs)
    }
