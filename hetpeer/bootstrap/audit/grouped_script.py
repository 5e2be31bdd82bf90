"""A grouped run in an order in which one machine can compute it: batches, copies and averagings of clusters.

Pure. The log decides in which order clusters were founded, trained batches and installed means; the
volunteers' signed lines say in which order numbers were added up. What nobody has signed is left out, with
all that needs it. The machine holds the parameters of all living clusters, since a mean is of several.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.bootstrap.audit.log_checks import MajorityStatements
from hetpeer.bootstrap.audit.replay_script import BlockSum, ReplayStep, block_sum, replay_step
from hetpeer.bootstrap.log.evidence import AppliedEvent, Evidence
from hetpeer.bootstrap.log.history import Decision, Record, decisions_of

Version = tuple[int, int, int]
"""Cluster, how often it had gone back to a checkpoint, and version of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A mean that a cluster has installed as its step `step`."""

    step: int
    blocks: Sequence[BlockSum]
    """Signed updates of its holders, by block index."""


@dataclass(slots=True)
class GroupedScript:
    """Computations in order, each with its result in the run."""

    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Tasks of grouped_machine.py."""
    expected: dict[int, tuple[int, ReplayStep | Installed | Record]] = field(default_factory=dict)
    """Task → its cluster, and the run's numbers: of a batch, an installed mean or an evaluation."""

    @classmethod
    def of(cls, records: Sequence[Record], evidence: Evidence, blocks: int) -> GroupedScript:
        """Script of the run with this log, as far as its volunteers' lines go."""
        script = cls()
        _Writer(script, records, evidence, blocks).write(records)
        return script

    @property
    def steps(self) -> int:
        """Batches and installed means that can be compared."""
        return sum(isinstance(one, ReplayStep | Installed) for _, one in self.expected.values())

    @property
    def trained(self) -> list[ReplayStep]:
        """The batches among them."""
        return [one for _, one in self.expected.values() if isinstance(one, ReplayStep)]


class _Writer:
    """Writes the tasks of `script`, record by record."""

    def __init__(
        self, script: GroupedScript, records: Sequence[Record], evidence: Evidence, blocks: int
    ) -> None:
        self._script = script
        self._applied = MajorityStatements.of(evidence.applied).applied
        self._arithmetics = {
            peer: {event.arithmetic for event in events} for peer, events in evidence.lives.items()
        }
        self._blocks = blocks
        self._lives: Counter[int] = Counter()
        """Cluster → how often it has gone back to a checkpoint."""
        self._held: set[Version] = set()
        """Versions that the machine has had."""
        self._means: set[int] = set()
        """Groups whose mean it has."""
        self._stored: Version | None = None
        """The last checkpoint; None: the initial parameters."""
        self._made: defaultdict[tuple[int, int], list[tuple[dict[str, Any], int, int]]] = defaultdict(list)
        """Cluster and life → its tasks that make a version, each with the number of that and the oldest it
        needs.
        """
        told = _Told.of(records)
        self._back, self._bases = told.back, told.bases
        self._copies, self._evaluated = told.copies, told.evaluated
        self._copied = {version for versions in told.copies.values() for version in versions}
        self._installed: defaultdict[int, list[Decision]] = defaultdict(list)
        """Group → the decisions by which clusters install its mean."""
        for record in records:
            if record["kind"] in ("average", "installed"):
                self._installed[record["group"]] += decisions_of(record)

    def write(self, records: Sequence[Record]) -> None:
        """Write the tasks of all records."""
        for place, record in enumerate(records):
            cluster = record.get("cluster", 0)
            match record["kind"]:
                case "founded":
                    self._found(cluster, record["version"])
                case "checkpoint":
                    self._stored = self._of(cluster, record["version"])
                case "rollback" if place in self._back:
                    self._lives[cluster] += 1
                    self._found(cluster, record["to_version"])
                case "commit":
                    self._train(cluster, record)
                case "average":
                    self._average(record)
                    self._install(record)
                case "installed":
                    self._install(record)
                case "dissolved":
                    self._task(do="end", cluster=cluster)
                case _:
                    pass
        for tasks in self._made.values():
            oldest = None
            for task, made, base in reversed(tasks):
                task["oldest"] = made if oldest is None else min(oldest, made)
                oldest = base if oldest is None else min(oldest, base)

    def _task(self, **task: Any) -> int:
        self._script.tasks.append(task)
        return len(self._script.tasks) - 1

    def _of(self, cluster: int, version: int) -> Version:
        """A version of `cluster` since it has gone back last."""
        return cluster, self._lives[cluster], version

    def _found(self, cluster: int, version: int) -> None:
        """Write that `cluster` begins with the last checkpoint, or goes back to it."""
        if self._stored is None or self._stored in self._held:
            self._task(do="begin", cluster=cluster, base=self._stored)
            self._reached(cluster, version)

    def _reached(self, cluster: int, version: int) -> None:
        """Write what is to be done with this version before the next one is made of it."""
        here = self._of(cluster, version)
        self._held.add(here)
        if here in self._evaluated:
            skipped = self._evaluated[here].get("skipped", ())
            task = self._task(do="evaluate", cluster=cluster, version=version, skipped=skipped)
            self._script.expected[task] = cluster, self._evaluated[here]
        if here in self._copied:
            self._task(do="copy", cluster=cluster, life=self._lives[cluster], version=version)
        if here in self._bases:
            self._task(do="keep", cluster=cluster, life=self._lives[cluster], version=version)

    def _train(self, cluster: int, commit: Record) -> None:
        [decision] = decisions_of(commit)
        told = self._told(decision)
        base = decision.step - decision.behind
        needed = {self._of(cluster, decision.step), self._of(cluster, base)}
        if not self._held >= needed or not all(told):
            return
        step = replay_step(commit, decision, [block_sum(events) for events in told], self._arithmetics)
        task = self._task(do="train", cluster=cluster, **step.work())
        self._made[cluster, self._lives[cluster]].append((self._script.tasks[task], decision.step + 1, base))
        self._script.expected[task] = cluster, step
        self._reached(cluster, decision.step + 1)

    def _average(self, record: Record) -> None:
        """The mean, in the order of additions that some cluster of the group has signed."""
        copies = {version[0]: version for version in self._copies[record["group"]]}
        if not self._held.issuperset(copies.values()):
            return
        orders = []
        for block in range(self._blocks):
            told = (self._told(decision)[block] for decision in self._installed[record["group"]])
            events = next(filter(None, told), None)
            if events is None:
                return
            added = [cluster for _, ids in events[0].cover for cluster in ids]
            if not copies.keys() >= set(added):  # the audit says so: rule F1
                return
            orders.append([copies[cluster] for cluster in added])
        self._means.add(record["group"])
        self._task(do="average", group=record["group"], orders=orders)

    def _install(self, record: Record) -> None:
        for decision in decisions_of(record):
            told, cluster = self._told(decision), decision.cluster
            known = record["group"] in self._means and self._of(cluster, decision.step) in self._held
            if not known or not all(told):
                continue
            blocks = [block_sum(events) for events in told]
            task = self._task(
                do="install",
                cluster=cluster,
                group=record["group"],
                plan=decision.plan,
                of=len(decision.clusters),
                states=[block.state for block in blocks],
            )
            made = self._made[cluster, self._lives[cluster]]
            made.append((self._script.tasks[task], decision.step + 1, decision.step))
            self._script.expected[task] = cluster, Installed(step=decision.step, blocks=blocks)
            self._reached(cluster, decision.step + 1)

    def _told(self, decision: Decision) -> list[list[AppliedEvent]]:
        """Signed lines of the holders on each block of an update."""
        return [self._applied.get((*decision.key, block), []) for block in range(self._blocks)]


@dataclass(slots=True)
class _Told:
    """Versions that are copied, kept or evaluated later in the log: a replay must know them in advance."""

    back: set[int] = field(default_factory=set)
    """Positions of the records by which clusters go back to a checkpoint, not to the version they have."""
    bases: Counter[Version] = field(default_factory=Counter)
    """Checkpoints from which clusters begin, or to which they go back, each with the number of times."""
    copies: dict[int, list[Version]] = field(default_factory=dict)
    """Group → what was averaged."""
    evaluated: dict[Version, Record] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Told:
        """All of the log."""
        told = cls()
        lives: Counter[int] = Counter()
        versions: dict[int, int] = {}
        stored: Version | None = None
        for place, record in enumerate(records):
            cluster = record.get("cluster", 0)
            match record["kind"]:
                case "rollback" if record["to_version"] != versions.get(cluster):
                    lives[cluster] += 1
                    told.back.add(place)
                    versions[cluster] = record["to_version"]
                    told.bases.update([stored] if stored else [])
                case "founded":
                    versions[cluster] = record["version"]
                    told.bases.update([stored] if stored else [])
                case "commit":
                    versions[cluster] = record["step"] + 1
                case "average" | "installed":
                    if record["kind"] == "average":
                        told.copies[record["group"]] = [(c, lives[c], v) for c, v in record["clusters"]]
                    versions |= {member: step + 1 for member, step in record["installed"]}
                case "checkpoint":
                    stored = cluster, lives[cluster], record["version"]
                case "evaluation":
                    told.evaluated[cluster, lives[cluster], record["step"]] = record
                case _:
                    pass
        return told
