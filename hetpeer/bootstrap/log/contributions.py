"""Every contribution of a run: each microbatch that was counted, came too late, or was lost and done again, with the parameters that it was computed with.

Pure. What was *used*, and its base, is what holders have signed. That something was *late* or *lost* is the coordinator's word in the log: with whom it was lost
cannot sign any more. Docs: asynchronous.md, "Every contribution".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from hetpeer.bootstrap.log import unused_work
from hetpeer.bootstrap.log.evidence import AppliedEvent, Key
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.logged_decision import Decision

USED, LATE, LOST = "used", "late", "lost"
DUPLICATE, AFTERWARDS = "duplicate", "afterwards"
"""Why it was late: it counted by somebody else, or its step was committed."""
REDONE, GIVEN_UP, TAKEN_BACK = "redone", "given up", "taken back"
"""Why it was lost: its holder left, or the sum that it was in overlapped with a larger one; its step came to nothing; or its commit did, as the run went back or the cluster fell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Of one microbatch to one step. Whatever else becomes of the id, it is used once."""

    cluster: int
    view: int
    step: int
    batch: int
    id: int
    base: int
    """The version of the parameters with which it was computed."""
    staleness: int
    """Updates that were committed since, before that of its own step."""
    state: str
    """USED, LATE or LOST."""
    why: str = ""
    """As above, of what was not used."""
    peers: tuple[str, ...] = ()
    """Who has computed it, in the order of the blocks; of what was late or lost who it was that was, unless a commit was taken back."""
    signed: bool = False
    """Whether holders of every block have signed that it is in their update once, and with which base its step was begun."""
    group: int | None = None
    """The first averaging of its cluster by which it came to others."""


@dataclass(slots=True)
class Tally:
    """How many contributions there are."""

    used: dict[int, int] = field(default_factory=dict)
    """Staleness → how many."""
    signed: int = 0
    """Of those that were used."""
    late: int = 0
    lost: int = 0
    waiting: int = 0
    """Batches of what was lost that are not in the result, so far."""
    silent: int = 0
    """Surviving steps of which the log does not say what was late or lost: a version before wrote it."""


class ContributionLog:
    """Of the run whose log says `records`, of which the decisions `surviving` are in the result; `applied` is what volunteers have signed. Ids from
    `early` on are computed with the version of their step; None: none are, where steps overlap.
    """

    def __init__(
        self,
        records: Sequence[Record],
        surviving: Iterable[Decision],
        applied: Mapping[Key, Sequence[AppliedEvent]],
        microbatches: int,
        blocks: int,
        early: int | None = None,
    ) -> None:
        self._records = records
        self._surviving = {one.key for one in surviving if one.trains}
        self._applied = applied
        self._microbatches = range(microbatches)
        self._blocks = range(blocks)
        self._early = microbatches if early is None else early
        self._copies: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """Cluster → (version of its copy, group) of its averagings."""
        for record in records:
            for cluster, version in record["clusters"] if record["kind"] == "average" else ():
                self._copies[cluster].append((version, record["group"]))

    def tally(self) -> Tally:
        """How many."""
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
        """In the order of the log; of each step by state, peer and id."""
        steps: dict[tuple[int, int], Contribution] = {}
        """Cluster and step → the last commit of it, as any of its contributions."""
        view = 0
        for record in self._records:
            cluster = record.get("cluster", 0)
            match record["kind"]:
                case "commit":
                    one = steps[cluster, record["step"]] = _of(record, cluster, record["view"])
                    yield from self._committed(one, record)
                    yield from self._unused(one, record, REDONE)
                    for step, late in record.get("afterwards", ()):
                        if (cluster, step) in steps:
                            yield from self._named(steps[cluster, step], late, LATE, AFTERWARDS)
                case "rollback" | "dissolved" | "halt":
                    for step in record.get("given_up", ()):
                        yield from self._unused(_of(step, cluster, view), step, GIVEN_UP)
                    view = record.get("view", view)
                case _:
                    pass

    def _survives(self, record: Record) -> bool:
        if record["kind"] != "commit":
            return False
        return (record.get("cluster", 0), record["view"], record["step"], record["plan"]) in self._surviving

    def _committed(self, one: Contribution, record: Record) -> Iterator[Contribution]:
        """All ids of a commit."""
        if not self._survives(record):
            yield from (replace(self._of_id(one, i), state=LOST, why=TAKEN_BACK) for i in self._microbatches)
            return
        key = one.cluster, one.view, one.step, record["plan"]
        said = [self._applied.get((*key, block), ()) for block in self._blocks]
        signed, peers = _signed(said, one.base), _peers(said)
        group = self._group(one)
        for microbatch in self._microbatches:
            yield replace(
                self._of_id(one, microbatch),
                peers=tuple(peers[microbatch]),
                signed=microbatch in signed,
                group=group,
            )

    def _unused(self, one: Contribution, record: Record, why: str) -> Iterator[Contribution]:
        yield from self._named(one, record.get("late", ()), LATE, DUPLICATE)
        yield from self._named(one, record.get("lost", ()), LOST, why)

    def _named(self, one: Contribution, written: Any, state: str, why: str) -> Iterator[Contribution]:
        for peer, number in unused_work.read(written):
            yield replace(self._of_id(one, number), state=state, why=why, peers=(peer,))

    def _of_id(self, one: Contribution, number: int) -> Contribution:
        """That of microbatch `number` to the step that `one` is of."""
        if number < self._early:
            return replace(one, id=number)
        return replace(one, id=number, base=one.step, staleness=0)

    def _group(self, one: Contribution) -> int | None:
        copies = self._copies[one.cluster]
        place = bisect_right(copies, one.step, key=lambda copy: copy[0])
        return copies[place][1] if place < len(copies) else None


def _of(record: Record, cluster: int, view: int) -> Contribution:
    """The first of the step that `record` is of, as if it were used."""
    behind = record.get("behind", 0)
    return Contribution(
        cluster=cluster,
        view=view,
        step=record["step"],
        batch=record["batch"],
        id=0,
        base=record["step"] - behind,
        staleness=behind,
        state=USED,
    )


def _peers(said: Sequence[Sequence[AppliedEvent]]) -> Mapping[int, Collection[str]]:
    """Id → who has computed it, block by block, as one holder of each says."""
    peers: defaultdict[int, dict[str, None]] = defaultdict(dict)
    for events in said:
        for holder, ids in events[0].cover if events else ():
            for microbatch in ids:
                peers[microbatch][holder] = None
    return peers


def _signed(said: Sequence[Sequence[AppliedEvent]], base: int) -> AbstractSet[int]:
    """Ids that are once in what every holder of every block says that it has applied, computed with version `base`. Nothing if of some block nobody says
    anything. Who does not say with which version, as before steps overlapped, means that of the step itself.
    """
    if not all(said):
        return frozenset()
    events = [event for block in said for event in block]
    if any((event.step if event.base is None else event.base) != base for event in events):
        return frozenset()
    return frozenset.intersection(
        *(frozenset(i for i, times in event.tally().items() if times == 1) for event in events)
    )
