"""Credit of each peer: samples times blocks counted in commits, from the log alone.

Pure. A commit says which peer did how much of it, and counts while it is part of the result. Docs: credit.md.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgpack

from hetpeer.bootstrap.log.batches import BatchLineage
from hetpeer.bootstrap.log.history import Record

Cover = Iterable[tuple[str, Collection[int]]]
"""Cover of one block: (holder, ids counted in its slot)."""


def work_in(covers: Iterable[Cover], sizes: Mapping[int, int]) -> Counter[str]:
    """Holder → samples times blocks in `covers`, which has one cover per block; `sizes`: id → samples."""
    work: Counter[str] = Counter()
    for cover in covers:
        for holder, ids in cover:
            work[holder] += sum(sizes.get(microbatch, 0) for microbatch in ids)
    return work


def written(
    work: Mapping[str, int], numbers: Mapping[str, int], roster: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Any]:
    """`work`, and the places in `roster`, if one is given, in the form of a commit record.

    `numbers`: peers that earlier commits name → their numbers.
    """
    newcomers = sorted((work.keys() | (roster or {}).keys()) - numbers.keys())
    known = {**numbers, **{peer: len(numbers) + place for place, peer in enumerate(newcomers)}}
    counted = sorted((known[peer], amount) for peer, amount in work.items())
    held = sorted((known[peer], *place) for peer, place in (roster or {}).items())
    return {
        **({"newcomers": newcomers} if newcomers else {}),
        "counted": [field for entry in counted for field in entry],
        **({} if roster is None else {"held": [field for entry in held for field in entry]}),
    }


class Contributors:
    """Numbers by which commits name peers."""

    def __init__(self) -> None:
        self._peers: list[str] = []

    def add(self, record: Record) -> None:
        """Fold one more record of the log."""
        self._peers += record.get("newcomers", ())

    def read(self, counted: Sequence[int]) -> Iterator[tuple[str, int]]:
        """(peer, samples times blocks) of a commit's `counted`; unknown numbers (log gap) are skipped."""
        for number, amount in zip(counted[::2], counted[1::2], strict=False):
            if number < len(self._peers):
                yield self._peers[number], amount

    def held(self, held: Sequence[int]) -> Iterator[tuple[str, tuple[int, int]]]:
        """(peer, place) of a commit's `held`; unknown numbers are skipped."""
        for number, begin, end in zip(held[::3], held[1::3], held[2::3], strict=False):
            if number < len(self._peers):
                yield self._peers[number], (begin, end)


class Credit:
    """Credit of each peer in the current result, folded from the run's log.

    `sample`: credit of one sample at one block (its tokens). `grouped`: number of batches, if the run is
    grouped. No peer's credit exceeds the total of the run's steps.
    """

    def __init__(self, sample: int = 1, grouped: int | None = None) -> None:
        self._sample = sample
        self._contributors = Contributors()
        self._commits: list[bytes] = []
        """`counted` of each commit, packed, since a long run has many."""
        self._result = _Steps() if grouped is None else _Batches(grouped)
        self._work: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Fold one more record."""
        if record["kind"] == "commit":
            self._contributors.add(record)
            self._commits.append(msgpack.packb(record.get("counted", ())))
        for number, sign in self._result.add(record):
            for peer, amount in self._contributors.read(msgpack.unpackb(self._commits[number - 1])):
                self._work[peer] += sign * amount

    @property
    def counting(self) -> AbstractSet[int]:
        """Commits that are part of the result, numbered from 1 in log order."""
        return self._result.counting

    @property
    def of(self) -> Mapping[str, int]:
        """Peer → credit, for every peer that has some."""
        return {peer: work * self._sample for peer, work in self._work.items() if work}


class _Steps:
    """Result of an exact run, steps in order; committing a step again takes back it and all later ones."""

    def __init__(self) -> None:
        self._count = 0
        self._steps, self._commits = array("Q"), array("Q")
        """Steps in rising order, each with its commit."""

    @property
    def counting(self) -> AbstractSet[int]:
        """Commits of the result, numbered from 1 in log order."""
        return set(self._commits)

    def add(self, record: Record) -> list[tuple[int, int]]:
        """Fold a record; return (commit, 1) for commits that join the result, (commit, -1) if they leave."""
        match record["kind"]:
            case "commit":
                taken = self._back_to(record["step"])
                self._count += 1
                self._steps.append(record["step"])
                self._commits.append(self._count)
                return [*taken, (self._count, 1)]
            case "rollback":
                return self._back_to(record["to_version"])
            case _:
                return []

    def _back_to(self, step: int) -> list[tuple[int, int]]:
        kept = bisect_left(self._steps, step)
        taken = [(commit, -1) for commit in self._commits[kept:]]
        del self._steps[kept:], self._commits[kept:]
        return taken


class _Batches:
    """Result of a grouped run of `count` batches: the batches in living clusters."""

    def __init__(self, count: int) -> None:
        self._batches = BatchLineage(count)
        self._count = 0
        self.counting: set[int] = set()

    def add(self, record: Record) -> list[tuple[int, int]]:
        self._batches.add(record)
        match record["kind"]:
            case "commit":
                self._count += 1
                self.counting.add(self._count)
                return [(self._count, 1)]
            case "rollback" | "reign" | "founded" | "dissolved":
                before, self.counting = self.counting, self._batches.commits()
                gone = [(number, -1) for number in before - self.counting]
                return gone + [(number, 1) for number in self.counting - before]
            case _:
                return []
