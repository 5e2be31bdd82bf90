"""The surviving history of a run: the coordinator's log folded into one value; decisions in log records.

Pure. Records are plain dicts (bootstrap/log/record_log.py). A roll-back to version v takes back every earlier
commit of a step ≥ v; the rest is the curve that the author sees. In a grouped run each cluster has a history
of its own in the same log: records name their cluster (default 0); an averaging names the clusters that took
part and those that installed it. Decisions are the updates that holders may apply, and no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetpeer.bootstrap.log.moves import KEPT, Move, MovePromise, MoveResult

Record = Mapping[str, Any]
RECENT = 64
"""Number of newest commits that a history keeps if it is not `whole`."""


@dataclass(slots=True)
class History:
    """Folded log: `version` committed updates; `commits[step]` and `evaluations[step]`: surviving ones."""

    cluster: int = 0
    whole: bool = True
    """Whether all commits and averagings are kept; otherwise only those of the RECENT newest steps."""
    term: int = 0
    view: int = 0
    version: int = 0
    commits: dict[int, Record] = field(default_factory=dict)
    averages: dict[int, Record] = field(default_factory=dict)
    """Step → averaging with other clusters."""
    evaluations: dict[int, float] = field(default_factory=dict)
    hits: dict[int, Sequence[int]] = field(default_factory=dict)
    """Step → targets of its evaluation that are predicted right, and that count."""
    unevaluated: dict[int, Sequence[int]] = field(default_factory=dict)
    """Step → held-out ids that cannot be computed: its evaluation is the mean of the others."""
    checkpoint: Record | None = None
    """Last checkpoint of any cluster."""
    sealed: int | None = 0
    """Version of this history with a complete checkpoint in the store, if any."""
    bad: dict[tuple[int | None, int], Record] = field(default_factory=dict)
    """(batch, id) of microbatches that cannot be computed → record; held-out ids have no batch."""
    base: Record | None = None
    """Checkpoint that this history starts from; None: the initial state."""
    rollbacks: int = 0
    since_view: int = 0
    """View since which the present version has been of this history: later roll-backs went to it itself."""
    amendment: str = ""
    """Last amendment of the manifest, in hexadecimal."""
    amended: int = 0
    """Number of that amendment; of two with the same number the one recorded first counts."""
    arranged: Sequence[Sequence[Sequence[int]]] = ()
    """Layouts of the first clusters since the last rebalancing."""
    plan: Record | None = None
    """The last `planned` record: who is to be where by a plan that was given (run/seat_plan.py)."""
    plan_since: int = 0
    """Step at which that plan came into force, or volunteers were last moved to their seats in it."""
    plan_ended: int | None = None
    """Step from which blocks are divided otherwise; None: the plan is in force."""
    backups: frozenset[str] = frozenset()
    """Volunteers that keep a place and take part in no step."""
    moves: list[Move] = field(default_factory=list)
    """The newest moves of blocks, with what they promised and what came (moves.py)."""
    cut: Sequence[Sequence[int]] | None = None
    """Layout of this cluster, if it was founded with a cut of its own."""
    departures: Counter[str] = field(default_factory=Counter)
    """Peer → how often it left or was lost."""
    trained_s: float = 0.0
    """Seconds of all commits of this history so far, those that were rolled back, too."""
    named_at: dict[str, float] = field(default_factory=dict)
    """Peer → `trained_s` when the log first named it."""
    contributors: dict[str, int] = field(default_factory=dict)
    """Peer → number by which commits of any cluster name it (credit.py)."""

    @classmethod
    def of(cls, records: Iterable[Record], *, whole: bool = True) -> History:
        """History of cluster 0 in `records`, which are in log order."""
        history = cls(whole=whole)
        for record in records:
            history.add(record)
        return history

    def add(self, record: Record) -> None:
        """Fold one more record."""
        for peer in record.get("newcomers", ()):
            self.contributors[peer] = len(self.contributors)
            self.named_at.setdefault(peer, self.trained_s)
        match record["kind"]:
            case "reign":
                self.term = int(record["term"])
                self._settle(MoveResult(why="another coordinator took over before it had settled"))
            case "amendment":
                if int(record["sequence"]) > self.amended:
                    self.amended, self.amendment = int(record["sequence"]), str(record["data"])
            case "arranged":
                self.arranged = record["layouts"]
                if self.plan is not None and self.plan_ended is None:
                    by_plan = record.get("plan") == self.plan["id"]
                    self.plan_since = self.version if by_plan else self.plan_since
                    self.plan_ended = None if by_plan else self.version
                self.backups = frozenset(record.get("backups", ()))
                self._settle(MoveResult(why="blocks were moved again before it had settled"))
                if "promise" in record:
                    promise = MovePromise.model_validate(record["promise"])
                    self.moves = [*self.moves, Move(step=self.version, promise=promise)][-KEPT:]
            case "planned":
                self.plan, self.plan_since, self.plan_ended = record, self.version, None
                self.arranged = [*record["layouts"], *self.arranged]
            case "backups":
                self.backups = frozenset(record["peers"])
            case "moved":
                self._settle(MoveResult.model_validate(record))
            case "bad_sample":
                self.bad[record["batch"], int(record["id"])] = record
            case "gone":
                self.departures[str(record["peer"])] += 1
                self.named_at.setdefault(str(record["peer"]), self.trained_s)
            case "average" | "installed":
                for cluster, step in record["installed"]:
                    if cluster == self.cluster:
                        self._keep(self.averages, step, record)
                        self.version = step + 1
            case "checkpoint":
                own = record.get("cluster", 0) == self.cluster
                self.checkpoint, self.sealed = record, int(record["version"]) if own else None
                self.base = record
            case _ if record.get("cluster", 0) == self.cluster:
                self._add_own(record)
            case _:
                pass

    def _add_own(self, record: Record) -> None:
        """Fold a record of this cluster."""
        match record["kind"]:
            case "commit":
                self.version = int(record["step"]) + 1
                self.trained_s += float(record.get("seconds", 0.0))
                self._keep(self.commits, int(record["step"]), record)
            case "evaluation":
                step = int(record["step"])
                self.evaluations[step] = float(record["loss"])
                self.unevaluated[step] = tuple(record.get("skipped", ()))
                self.hits.pop(step, None)
                if "hits" in record:
                    self.hits[step] = tuple(record["hits"])
            case "founded":
                self.version = self.sealed = int(record["version"])
                self.base = self.checkpoint
                self.cut = record.get("layout")
            case "rollback":
                self.view = int(record["view"])
                if self.version != int(record["to_version"]):  # else the steps under way are begun anew
                    self.version = self.sealed = int(record["to_version"])
                    self.since_view = self.view
                self.rollbacks += 1
                self.commits = {s: c for s, c in self.commits.items() if s < self.version}
                self.averages = {s: a for s, a in self.averages.items() if s < self.version}
                self.evaluations = {s: x for s, x in self.evaluations.items() if s <= self.version}
                self.unevaluated = {s: x for s, x in self.unevaluated.items() if s <= self.version}
                self.hits = {s: x for s, x in self.hits.items() if s <= self.version}
            case _:
                pass

    def _settle(self, result: MoveResult) -> None:
        """End the last move if it is not settled."""
        if self.moves and self.moves[-1].result is None:
            self.moves = [*self.moves[:-1], self.moves[-1].model_copy(update={"result": result})]

    def _keep(self, steps: dict[int, Record], step: int, record: Record) -> None:
        steps[step] = record
        while not self.whole and (oldest := next(iter(steps))) <= step - RECENT:
            del steps[oldest]

    def of_another(self, cluster: int) -> History:
        """History of `cluster` by the same records, provided that none belongs to it or to this cluster."""
        return replace(
            self,
            cluster=cluster,
            commits=dict(self.commits),
            averages=dict(self.averages),
            evaluations=dict(self.evaluations),
            unevaluated=dict(self.unevaluated),
            hits=dict(self.hits),
            bad=dict(self.bad),
            departures=self.departures.copy(),
            named_at=dict(self.named_at),
            contributors=dict(self.contributors),
        )

    @property
    def stored(self) -> bool:
        """Whether the store has a complete checkpoint of the current version."""
        return self.sealed == self.version

    @property
    def digests(self) -> Mapping[int, str]:
        """Block → digest of the current version's state; empty if the store does not have it."""
        return dict(enumerate(self.base["blocks"])) if self.base is not None and self.stored else {}

    @property
    def checkpoint_version(self) -> int:
        """Version of the last complete checkpoint; the initial state is version 0."""
        return 0 if self.checkpoint is None else int(self.checkpoint["version"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A committed step of one cluster, or its part in an averaging of `clusters`."""

    cluster: int
    view: int
    step: int
    plan: int
    digests: Mapping[int, str]
    """Block → digest of the sum to apply."""
    behind: int = 0
    """Staleness of the gradient, in versions; a mean may be among them (`Means`)."""
    batch: int = 0
    """Batch that was trained."""
    clusters: frozenset[int] = frozenset()
    counted: Sequence[int] | None = None
    """Credit of the commit in the record's form (credit.py); None: not stated."""
    skipped: Sequence[int] = ()
    """Training ids that cannot be computed: they are in no sum, and the loss is the mean of the others."""

    @property
    def trains(self) -> bool:
        """Whether this is a step; an averaging otherwise."""
        return not self.clusters

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Cluster, view, step and plan."""
        return self.cluster, self.view, self.step, self.plan

    def __str__(self) -> str:
        return f"step {self.step} of cluster {self.cluster}" if self.cluster else f"step {self.step}"


def view_in(record: Record, cluster: int) -> int:
    """View of `cluster` when it installed the averaging of `record`."""
    return int(dict(record.get("views", ())).get(cluster, 0))


def decisions_of(record: Record) -> Iterator[Decision]:
    """Decisions of a record: one for a commit, one per cluster that installed an averaging."""
    match record["kind"]:
        case "commit":
            yield Decision(
                cluster=record.get("cluster", 0),
                view=record["view"],
                step=record["step"],
                plan=record["plan"],
                digests={int(block): digest for block, digest in record["gradients"].items()},
                behind=record.get("behind", 0),
                batch=record.get("batch", record["step"]),
                counted=record.get("counted"),
                skipped=tuple(record.get("skipped", ())),
            )
        case "average" | "installed":
            members = frozenset(cluster for cluster, _ in record["clusters"])
            digests = {int(block): digest for block, digest in record["sums"].items()}
            for cluster, step in record["installed"]:
                yield Decision(
                    cluster=cluster,
                    view=view_in(record, cluster),
                    step=step,
                    plan=record["plan"],
                    digests=digests,
                    clusters=members,
                )
        case _:
            return


class Means:
    """The versions of a log's clusters that were made by installing a mean, and by no update."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._made = {
            (one.cluster, one.view, one.step)
            for record in records
            for one in decisions_of(record)
            if not one.trains
        }

    def updates_behind(self, cluster: int, view: int, step: int, behind: int) -> int:
        """Staleness in updates of a gradient for step `step` that is `behind` versions old.

        A view gives up all steps before it, so the versions since the gradient's are of `view`, too.
        """
        return sum((cluster, view, number) not in self._made for number in range(step - behind, step))
