"""The division of a block's flat gradient for a reduce: into the reducers' shares, and these into shards.

Pure. A reduce is a reduce-scatter and an all-gather in which every shard has one reducer: all holders with a
sum send it their parts, it adds them in the plan's order and sends the result to all receivers. With equal
shares a holder sends as many bytes as in a ring, 2 (N - 1) / N of the vector. The members of a ring all send
the same, whatever their links. Here a holder with sums sends its vector once, and N - 2 times what it
reduces, so a slow one reduces less or nothing.

The choice of shares with which the busiest uplink finishes soonest is a linear program. Blocks are filled one
after the other like water, each on top of the load that the others put on the uplinks, until no share
changes: this minimizes the sum of load² / uplink, which also minimizes the maximum if all holders of a block
have sums of it. Docs: averaging.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hetpeer.averaging.effects import Shard
from hetpeer.averaging.messages import Cover

LENGTH = 1 << 17
"""Elements of a shard (512 KiB), so that sums leave a reducer while parts still come in."""
SPARSE_LENGTH = 1 << 19
"""Elements of a shard of movements: 9 kB as they are sent, 2 MiB as they are added up."""
AT_ONCE = 8
"""Peers. A sender to more at a time sends shorter shards, or all first shards would arrive late."""
SHORTEST = 1 << 13
"""Elements; of a shorter one the head and the worker's call cost as much as what it carries."""
PIECES = 64
"""Most shards of one share."""


def shares_of(cover: Cover, elements: int) -> list[tuple[str, int, int]]:
    """(reducer, begin, end): elements [begin, end) of `cover.block`'s flat gradient that it adds up."""
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
    """The reducers' shares, cut into shards of about `length` elements, or of the length in `cover`."""
    length, shards = cover.length or length, list[Shard]()
    for reducer, begin, end in shares_of(cover, elements):
        count = max(1, min(PIECES, -(-(end - begin) // length)))
        borders = [begin + (end - begin) * piece // count for piece in range(count + 1)]
        shards += [
            Shard(plan, cover.block, index, *pair, reducer)
            for index, pair in enumerate(pairwise(borders), len(shards))
        ]
    return shards


def shards_for_all(plan: int, cover: Cover, ranges: Iterable[tuple[int, int]]) -> list[Shard]:
    """The shards of a block that every receiver adds up itself, receiver by receiver.

    Parts are so small that nobody sends sums. All receivers get the same pieces of the `ranges` that are
    encoded by themselves, and a piece is whole windows of the codec.
    """
    pieces = [
        (begin, min(begin + SPARSE_LENGTH, last))
        for first, last in ranges
        for begin in range(first, max(last, first + 1), SPARSE_LENGTH)
    ]
    shards = [(*piece, to) for to in cover.receivers for piece in pieces]
    return [Shard(plan, cover.block, index, *shard) for index, shard in enumerate(shards)]


def in_turns(shards: Iterable[Shard]) -> list[Shard]:
    """Order `shards` so that all reducers' first shards come first, then the second: no reducer idles."""
    seen: Counter[str] = Counter()
    turns = []
    for shard in shards:
        turns.append((seen[shard.reducer], shard.index, shard))
        seen[shard.reducer] += 1
    return [shard for _, _, shard in sorted(turns, key=lambda turn: turn[:2])]


SWEEPS, STILL = 100, 1e-4
"""The iteration ends when no share changes by more than STILL in a sweep, or after SWEEPS sweeps."""
PARTS = 1 << 10
"""Units of an equal share; a reducer that would get less than half a unit gets nothing."""
ALIKE = 0.1
"""Uplinks that differ from the middle one by no more may be the same line, measured twice."""
FREE = 0.001
"""Cost of reducing where it is free (two holders): above 0, so that only the faster one reduces."""


@dataclass(frozen=True, slots=True)
class ReducerLoad:
    """One block to be reduced: its elements, the holders with sums, and the receivers of the result.

    All receivers may reduce, or only those that are `fit`.
    """

    elements: int
    senders: frozenset[str]
    receivers: tuple[str, ...]
    fit: tuple[str, ...] = ()

    @property
    def reducers(self) -> tuple[str, ...]:
        """Peers that may reduce."""
        return self.fit or self.receivers

    def given(self, peer: str) -> float:
        """Elements that `peer` sends whatever it reduces."""
        shared = len(self.receivers) > 1
        return float(self.elements) if shared and peer in self.senders else 0.0

    def reducing(self, peer: str) -> float:
        """Elements that a holder sends in addition if it reduces the whole block."""
        others = len(self.receivers) - 1
        return max(self.elements, 1) * max(others - (peer in self.senders), FREE)


def alike(uplinks: Mapping[str, float]) -> dict[str, float]:
    """`uplinks`, with those replaced by the median that are as near to it as two measurements of the same
    link.

    A peer that reduces more also receives more, so equal links should have equal shares.
    """
    known = [rate for rate in uplinks.values() if rate > 0]
    usual = median(known) if known else 0.0
    return {peer: usual if abs(rate - usual) <= ALIKE * usual else rate for peer, rate in uplinks.items()}


def divide(
    loads: Mapping[int, ReducerLoad], uplinks: Mapping[str, float], *, guarded: bool = False
) -> dict[int, tuple[tuple[str, int], ...]]:
    """Block → (reducer, share) in the order of its receivers; shares are relative to their sum.

    `uplinks`: bytes/s, or any unit; an unknown one (0) is taken to be the median of the known ones.
    `guarded`: every reducer gets between half of an equal share and two, whatever `uplinks` says. A reducer
    of everything would show nobody its own part, and a peer that alone receives the parts of others would be
    the only witness of what they sent (spot checks, docs/trust.md).
    """
    known = [rate for rate in uplinks.values() if rate > 0]
    usual = median(known) if known else 1.0
    rates = {p: uplinks.get(p, 0.0) or usual for load in loads.values() for p in load.receivers}
    shares: dict[int, dict[str, float]] = {block: {} for block in loads}
    busy = dict.fromkeys(rates, 0.0)
    for load in loads.values():
        for peer in load.receivers:
            busy[peer] += load.given(peer)
    for _ in range(SWEEPS if len(loads) > 1 else 1):
        moved = 0.0
        for block, load in loads.items():
            before = shares[block]
            for peer, share in before.items():
                busy[peer] -= share * load.reducing(peer)
            after = shares[block] = _fill(load, busy, rates)
            for peer, share in after.items():
                busy[peer] += share * load.reducing(peer)
            moved = max(
                [moved, *(abs(after.get(p, 0.0) - before.get(p, 0.0)) for p in before.keys() | after)]
            )
        if moved < STILL:
            break
    bounds = (PARTS // 2, 2 * PARTS) if guarded else (0, None)
    return {block: _whole(load.reducers, shares[block], *bounds) for block, load in loads.items()}


def _fill(load: ReducerLoad, busy: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
    """Shares that add up to 1: all reducers with a share finish together, and none without one would finish
    earlier.

    A peer that finishes at time t has a share of (rate t - busy) / reducing.
    """
    slope = offset = done = 0.0
    filled: list[str] = []
    for peer in sorted(load.reducers, key=lambda peer: busy[peer] / rates[peer]):
        if filled and slope * busy[peer] / rates[peer] - offset >= 1.0:
            break
        filled.append(peer)
        slope += rates[peer] / load.reducing(peer)
        offset += busy[peer] / load.reducing(peer)
        done = (1.0 + offset) / slope
    return {peer: (rates[peer] * done - busy[peer]) / load.reducing(peer) for peer in filled}


def _whole(
    peers: Sequence[str], shares: Mapping[str, float], least: int, most: int | None
) -> tuple[tuple[str, int], ...]:
    parts = [(peer, max(round(PARTS * len(peers) * shares.get(peer, 0.0)), least)) for peer in peers]
    return tuple((peer, share if most is None else min(share, most)) for peer, share in parts if share)
