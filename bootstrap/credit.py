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

from hetpeer.bootstrap.grouped.batches import Batches
from hetpeer.bootstrap.numbers import Numbers

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
        self._result: _Result = _Steps() if grouped is None else Batches(grouped)
        self._counting = Numbers()
        self._work: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Fold one more record."""
        self._result.add(record)
        match record["kind"]:
            case "commit":
                self._contributors.add(record)
                self._commits.append(msgpack.packb(record.get("counted", ())))
                self._give(len(self._commits), 1)
            case "rollback" | "reign" | "founded" | "dissolved":
                counting = self._result.commits()
                for number in self._counting - counting:
                    self._give(number, -1)
                for number in counting - self._counting:
                    self._give(number, 1)
            case _:
                pass

    def _give(self, number: int, sign: int) -> None:
        """To whom commit `number` counted something: or take it back."""
        if sign > 0:
            self._counting.add(number)
        else:
            self._counting.discard(number)
        for peer, amount in self._contributors.read(msgpack.unpackb(self._commits[number - 1])):
            self._work[peer] += sign * amount

    @property
    def counting(self) -> AbstractSet[int]:
        """The commits of the log, counted from 1, that are part of the result."""
        return self._counting

    @property
    def of(self) -> Mapping[str, int]:
        """Peer → credit, of everybody who has some."""
        return {peer: work * self._sample for peer, work in self._work.items() if work}


class _Result(Protocol):
    """Which commits of the log, counted from 1, are part of what was trained so far."""

    def add(self, record: Record) -> None: ...

    def commits(self) -> AbstractSet[int]: ...


class _Steps:
    """Of an exact run: one after the other, and back."""

    def __init__(self) -> None:
        self._count = 0
        self._steps, self._commits = array("Q"), array("Q")
        """Steps in rising order, and the commit that made each."""

    def add(self, record: Record) -> None:
        match record["kind"]:
            case "commit":
                self._count += 1
                self._cut(record["step"])
                self._steps.append(record["step"])
                self._commits.append(self._count)
            case "rollback":
                self._cut(record["to_version"])
            case _:
                pass

    def _cut(self, step: int) -> None:
        kept = bisect_left(self._steps, step)
        del self._steps[kept:], self._commits[kept:]

    def commits(self) -> AbstractSet[int]:
        return set(self._commits)
