"""What each peer has contributed to a run: samples times blocks that are counted in commits, from the log alone.

Pure. A commit says how much of it is whose; what it gives counts for as long as it is part of the result. Docs: credit.md.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import msgpack

from hetpeer.bootstrap.log.batches import BatchLineage

Record = Mapping[str, Any]
Cover = Iterable[tuple[str, Collection[int]]]
"""Of one block: each holder, and the ids that its slot counts."""


def work_in(covers: Iterable[Cover], sizes: Mapping[int, int]) -> Counter[str]:
    """Samples times blocks of each holder in `covers`, one for each block; `sizes`: how many samples each id has."""
    work: Counter[str] = Counter()
    for cover in covers:
        for holder, ids in cover:
            work[holder] += sum(sizes.get(microbatch, 0) for microbatch in ids)
    return work


def written(work: Mapping[str, int], numbers: Mapping[str, int]) -> dict[str, Any]:
    """`work` as a commit record has it; `numbers`: the peers that earlier commits name."""
    newcomers = sorted(work.keys() - numbers.keys())
    known = {**numbers, **{peer: len(numbers) + place for place, peer in enumerate(newcomers)}}
    counted = sorted((known[peer], amount) for peer, amount in work.items())
    return {
        **({"newcomers": newcomers} if newcomers else {}),
        "counted": [field for entry in counted for field in entry],
    }


class Contributors:
    """The peers that commits name, by their numbers."""

    def __init__(self) -> None:
        self._peers: list[str] = []

    def add(self, record: Record) -> None:
        """Fold one more record of the log."""
        self._peers += record.get("newcomers", ())

    def read(self, counted: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Peer and samples times blocks, of a commit's `counted`. A number that nobody has, of a log with a gap, is nobody's."""
        for number, amount in zip(counted[::2], counted[1::2], strict=False):
            if number < len(self._peers):
                yield self._peers[number], amount


class Credit:
    """A run's log, folded: who has which part in the result as it stands. `grouped`: its number of batches, if the run is grouped.

    `sample`: what a sample counts at a block, its tokens. No number is larger than all that the run's steps can give.
    """

    def __init__(self, sample: int = 1, grouped: int | None = None) -> None:
        self._sample = sample
        self._contributors = Contributors()
        self._commits: list[bytes] = []
        """What each commit of the log counted, packed: a long run has many."""
        self._result: _Result = _Steps() if grouped is None else _Batches(grouped)
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
        """The commits of the log, counted from 1, that are part of the result."""
        return self._result.counting

    @property
    def of(self) -> Mapping[str, int]:
        """Peer → credit, of everybody who has some."""
        return {peer: work * self._sample for peer, work in self._work.items() if work}


class _Result(Protocol):
    """Which commits of the log, counted from 1, are part of what was trained so far."""

    @property
    def counting(self) -> AbstractSet[int]: ...

    def add(self, record: Record) -> Iterable[tuple[int, int]]:
        """Fold one more record: commits that are part of it from then on (1), or are no longer (-1)."""


class _Steps:
    """Of an exact run: one after the other, and back. A step that is there again has taken back those behind it."""

    def __init__(self) -> None:
        self._count = 0
        self._steps, self._commits = array("Q"), array("Q")
        """Steps in rising order, and the commit that made each."""

    @property
    def counting(self) -> AbstractSet[int]:
        return set(self._commits)

    def add(self, record: Record) -> list[tuple[int, int]]:
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
    """Of a grouped run of so many: those that a living cluster has, whichever trained them."""

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
