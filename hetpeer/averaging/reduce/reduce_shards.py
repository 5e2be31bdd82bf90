"""How a block's flat gradient is divided for a reduce: into the reducers' shares, and these into shards.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from hetpeer.averaging.effects import Shard
from hetpeer.averaging.messages import Cover

LENGTH = 1 << 17
"""Elements of a shard (512 KiB), so that sums leave a reducer while parts still come in."""
AT_ONCE = 8
"""Peers. A sender that sends a shard to more peers at a time sends shorter ones, or all first shards would
arrive late.
"""
SHORTEST = 1 << 13
"""Elements; of a shorter one the head and the worker's call cost as much as what it carries."""
PIECES = 64
"""A share is cut into so many shards at most."""


def shares_of(cover: Cover, elements: int) -> list[tuple[str, int, int]]:
    """(reducer, begin, end): the elements [begin, end) of `cover.block`'s flat gradient that each reducer
    adds up.
    """
    total, given, begin = sum(share for _, share in cover.reducers), 0, 0
    shares: list[tuple[str, int, int]] = []
    for reducer, share in cover.reducers:
        given += share
        end = elements * given // total
        shares.append((reducer, begin, end))
        begin = end
    return shares


def length_of(cover: Cover) -> int:
    """Elements of a shard that `cover` should name; 0: LENGTH.

    A holder sends to all reducers at a time, and a reducer to all receivers, so links carry one shard to each
    of them before the first one is complete. With more than AT_ONCE peers shards are shorter.
    """
    at_once = max(len(cover.reducers), len(cover.receivers))
    return max(LENGTH * AT_ONCE // at_once, SHORTEST) if at_once > AT_ONCE else 0


def shards_of(plan: int, cover: Cover, elements: int, length: int = LENGTH) -> list[Shard]:
    """The reducers' shares of `cover`, cut into shards of about `length` elements, or of the length that
    `cover` names.
    """
    length, shards = cover.length or length, list[Shard]()
    for reducer, begin, end in shares_of(cover, elements):
        count = max(1, min(PIECES, -(-(end - begin) // length)))
        borders = [begin + (end - begin) * piece // count for piece in range(count + 1)]
        shards += [
            Shard(plan, cover.block, index, *pair, reducer)
            for index, pair in enumerate(pairwise(borders), len(shards))
        ]
    return shards


def in_turns(shards: Iterable[Shard]) -> list[Shard]:
    """Order `shards` so that the first shards of all reducers come first, then the second ones: no reducer
    waits idly.
    """
    seen: Counter[str] = Counter()
    turns = []
    for shard in shards:
        turns.append((seen[shard.reducer], shard.index, shard))
        seen[shard.reducer] += 1
    return [shard for _, _, shard in sorted(turns, key=lambda turn: turn[:2])]
