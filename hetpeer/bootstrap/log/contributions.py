"""Every contribution of a run: each microbatch that was used, late, or lost, and the version it used.

Pure. That a contribution was *used*, and its base version, are signed by holders. That it was *late* or
*lost* is the coordinator's statement in the log, since a lost volunteer can sign nothing. Docs:
asynchronous.md, "Every contribution".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from hetpeer.bootstrap.log import unused_work
from hetpeer.bootstrap.log.evidence import AppliedEvent, Key
from hetpeer.bootstrap.log.history import Decision, Means, Record
from hetpeer.stages.pipeline.delays import Delays

USED, LATE, LOST = "used", "late", "lost"
DUPLICATE, AFTERWARDS = "duplicate", "afterwards"
"""Reasons for *late*: another holder's copy counted, or the step was committed already."""
REDONE, GIVEN_UP, TAKEN_BACK = "redone", "given up", "taken back"
"""Reasons for *lost*: the holder left, or its slot overlapped with a larger one; the step was abandoned; or
the commit was taken back by a roll-back or the end of a cluster.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One microbatch's contribution to one step: used once per id, late or lost any number of times."""

    cluster: int
    view: int
    step: int
    batch: int
    id: int
    base: int
    """Version of the parameters that the microbatch was computed with, at the first block.

    Later stages may have used newer ones, by the manifest's rule (`Manifest.delays`).
    """
    staleness: int
    """Updates committed between `base` and its own step."""
    state: str
    """USED, LATE or LOST."""
    why: str = ""
    """Reason, if the contribution was late or lost."""
    peers: tuple[str, ...] = ()
    """Volunteers that computed it, in block order; for late or lost work the volunteer concerned."""
    signed: bool = False
    """Whether holders of every block signed that their update contains it once, with this base version."""
    group: int | None = None
    """First averaging that brought the contribution to other clusters."""


@dataclass(slots=True)
class Tally:
    """Counts of contributions."""

    used: dict[int, int] = field(default_factory=dict)
    """Staleness → number of used contributions."""
    signed: int = 0
    """Used contributions that holders of every block signed."""
    late: int = 0
    lost: int = 0
    waiting: int = 0
    """Batches of lost work that are not in the result yet."""
    silent: int = 0
    """Surviving steps whose record names no late or lost work: an earlier version wrote it."""


class ContributionLog:
    """Contributions of the run with the log `records`, an iterable of `Contribution`.

    `surviving` are the decisions in the result, `applied` what volunteers signed; `delays` says which
    versions steps that overlap are computed with.
    """

    def __init__(
        self,
        records: Sequence[Record],
        surviving: Iterable[Decision],
        applied: Mapping[Key, Sequence[AppliedEvent]],
        microbatches: int,
        blocks: int,
        delays: Delays | None = None,
    ) -> None:
        self._records = records
        self._means = Means(records)
        self._surviving = {one.key for one in surviving if one.trains}
        self._applied = applied
        self._microbatches = range(microbatches)
        self._blocks = range(blocks)
        self._delays = delays or Delays()
        self._copies: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """Cluster → (version of its copy, group) for each of its averagings."""
        for record in records:
            for cluster, version in record["clusters"] if record["kind"] == "average" else ():
                self._copies[cluster].append((version, record["group"]))

    def tally(self) -> Tally:
        """Counts over all contributions."""
        tally = Tally()
        batches: defaultdict[str, set[int]] = defaultdict(set)
        for one in self:
            batches[one.state].add(one.batch)
            match one.state:
                case "used":
                    tally.used[one.staleness] = tally.used.get(one.staleness, 0) + 1
                    tally.signed += one.signed
                case "late":
                    tally.late += 1
                case _:
                    tally.lost += 1
        tally.waiting = len(batches[LOST] - batches[USED])
        tally.silent = sum("late" not in one for one in self._records if self._survives(one))
        return tally

    def __iter__(self) -> Iterator[Contribution]:
        """Contributions in log order; within a step by state, peer and id."""
        steps: dict[tuple[int, int], Contribution] = {}
        """Cluster and step → a contribution of its last commit."""
        views: Counter[int] = Counter()
        """Cluster → view."""
        for record in self._records:
            cluster = record.get("cluster", 0)
            match record["kind"]:
                case "commit":
                    one = steps[cluster, record["step"]] = self._of(record, cluster, record["view"])
                    yield from self._committed(one, record)
                    yield from self._late_and_lost(one, record, REDONE)
                    for step, late in record.get("afterwards", ()):
                        if (cluster, step) in steps:
                            yield from self._named(steps[cluster, step], late, LATE, AFTERWARDS)
                case "rollback" | "dissolved" | "halt":
                    for step in record.get("given_up", ()):
                        told = self._of(step, cluster, views[cluster])
                        yield from self._late_and_lost(told, step, GIVEN_UP)
                    views[cluster] = record.get("view", views[cluster])
                case _:
                    pass

    def _of(self, record: Record, cluster: int, view: int) -> Contribution:
        """Contribution of id 0 to the step of `record`, as used."""
        behind = record.get("behind", 0)
        return Contribution(
            cluster=cluster,
            view=view,
            step=record["step"],
            batch=record["batch"],
            id=0,
            base=record["step"] - behind,
            staleness=self._means.updates_behind(cluster, view, record["step"], behind),
            state=USED,
        )

    def _survives(self, record: Record) -> bool:
        if record["kind"] != "commit":
            return False
        return (record.get("cluster", 0), record["view"], record["step"], record["plan"]) in self._surviving

    def _committed(self, one: Contribution, record: Record) -> Iterator[Contribution]:
        """Contributions of a commit's ids."""
        ids = [i for i in self._microbatches if i not in record.get("skipped", ())]
        if not self._survives(record):
            yield from (replace(self._of_id(one, i), state=LOST, why=TAKEN_BACK) for i in ids)
            return
        key = one.cluster, one.view, one.step, record["plan"]
        said = [self._applied.get((*key, block), ()) for block in self._blocks]
        behind = record.get("behind", 0)
        bases = [one.step - self._delays.behind(behind, 0, block) for block in self._blocks]
        signed, peers = _signed(said, bases), _peers(said)
        group = self._group(one)
        for microbatch in ids:
            yield replace(
                self._of_id(one, microbatch),
                peers=tuple(peers[microbatch]),
                signed=microbatch in signed,
                group=group,
            )

    def _late_and_lost(self, template: Contribution, record: Record, why: str) -> Iterator[Contribution]:
        """Contributions that `record` names late (duplicates) or lost (`why`); the rest is `template`'s."""
        yield from self._named(template, record.get("late", ()), LATE, DUPLICATE)
        yield from self._named(template, record.get("lost", ()), LOST, why)

    def _named(self, template: Contribution, written: Any, state: str, why: str) -> Iterator[Contribution]:
        """Contributions of the (peer, id) pairs in a record's field `written`."""
        for peer, number in unused_work.read(written):
            yield replace(self._of_id(template, number), state=state, why=why, peers=(peer,))

    def _of_id(self, template: Contribution, number: int) -> Contribution:
        """Contribution of microbatch `number` to the step of `template`."""
        if number < self._delays.head_start:
            return replace(template, id=number)
        return replace(template, id=number, base=template.step, staleness=0)

    def _group(self, one: Contribution) -> int | None:
        copies = self._copies[one.cluster]
        place = bisect_right(copies, one.step, key=lambda copy: copy[0])
        return copies[place][1] if place < len(copies) else None


def _peers(said: Sequence[Sequence[AppliedEvent]]) -> Mapping[int, Collection[str]]:
    """Id → volunteers that computed it, in block order, by the statement of one holder per block."""
    peers: defaultdict[int, dict[str, None]] = defaultdict(dict)
    for events in said:
        for holder, ids in events[0].cover if events else ():
            for microbatch in ids:
                peers[microbatch][holder] = None
    return peers


def _signed(said: Sequence[Sequence[AppliedEvent]], bases: Sequence[int]) -> AbstractSet[int]:
    """Ids that every holder of every block states to have applied exactly once, computed with the block's
    version in `bases`.

    Empty if no holder of some block made a statement. A statement without a version, as earlier releases
    wrote it, means the version of the step itself.
    """
    if not all(said):
        return frozenset()
    events = [event for block in said for event in block]
    if any(
        (event.step if event.base is None else event.base) != base
        for block, base in zip(said, bases, strict=True)
        for event in block
    ):
        return frozenset()
    return frozenset.intersection(
        *(frozenset(i for i, times in event.tally().items() if times == 1) for event in events)
    )
