"""Histories of clusters that average (mode `grouped`), and their invariants.

* Every update is the sum of exactly one batch's ids; that batch is in no living cluster and nobody else
  trains it.
* An averaging adds the parameters of exactly the clusters that its record names, and all holders have the
  same bits after it.
* No batch is in any parameters twice, by two trainings. At the end every batch is in them once
  (docs/grouped.md, "Exactly once").
* Sparse averagings are of all clusters, which have one anchor and install it at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import RecordApplied
from hetpeer.averaging.groups.group_scheduler import GroupPipelines
from hetpeer.averaging.groups.wait_window import WAITED, Adaptive, WaitWindow
from hetpeer.averaging.member.member_life import Phase
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.grouped.recut import WHY
from hetpeer.bootstrap.log.credit import Contributors, Credit
from hetpeer.bootstrap.log.history import view_in
from hetpeer.bootstrap.log.lineage import lineage
from hetpeer.bootstrap.service.core_interface import Core
from hetpeer.bootstrap.state.core_config import GATHER_S
from hetpeer.peer.simulate.sim_swarm import is_past
from tests.simulation.arrangements import Arrangements
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedState, CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.faults import MOMENTS, OF_CLUSTERS, Faults, Kills
from tests.simulation.histories import BLOCKS, LIMIT_S, HistoryOutcome, shape
from tests.simulation.invariants import Checks, Digests, require

INTERVALS = (1, 3)
"""Batches between averagings, in turn; every other four seeds' averagings are delayed."""
SLOW_S = (0.2, 1.0, 5.0)
"""Most seconds by which a part of a delayed averaging leaves late, in turn."""
SPAN = 1
AT_WORK = (Phase.READY, Phase.TRAINING, Phase.REDUCING)
WAIT = (1.0, WAITED)
"""Share of an iteration that a cluster waits for company, in turn for eight seeds each; longer waits average
more.
"""
SPARE_S = (2.0, 40.0)
"""Seconds until a volunteer that waits becomes a replica, in turn for sixteen seeds each."""
KILL_S = 3.0
"""Seconds between two kills."""
BATCHES = 12


def simulate(
    seed: int,
    *,
    faults: int,
    config: HistoryConfig | None = None,
    interval: int | None = None,
    delayed: bool | None = None,
    spare_s: float | None = None,
    kills: int = 0,
    kill_s: float = KILL_S,
    sparse: bool = False,
) -> HistoryOutcome:
    """One history with the symbolic model; a violation is in the outcome.

    By default `interval` is the one of INTERVALS whose turn it is, every other four seeds are `delayed`,
    and `spare_s` is one of SPARE_S. `kills` come one after the other, `kill_s` apart, besides the faults.
    `sparse`: averagings are of movements, of all clusters.
    """
    interval = interval or INTERVALS[seed // 2 % 2]
    delayed = not sparse and (bool(seed // 4 % 2) if delayed is None else delayed)
    shaped = replace(config or replace(shape(seed), steps=BATCHES), sparse=sparse)
    if delayed:
        enough = max(shaped.volunteers, 2 * len(shaped.layouts[0]))
        shaped = replace(shaped, volunteers=enough, part_s=(0.0, SLOW_S[seed % 3]))
    spare_s = SPARE_S[seed // 16 % 2] if spare_s is None else spare_s
    how = {"interval": interval, "delayed": delayed, "spare_s": spare_s}
    swarm = GroupedSwarm(seed, shaped, CheckedSymbols(BLOCKS), Coverage(), **how)
    Faults(swarm, faults, (*MOMENTS, *OF_CLUSTERS))
    Kills(swarm, kills, kill_s)
    if shaped.arranged_s:
        Arrangements(swarm, seed, shaped.arranged_s)
    violation: str | None = None
    try:
        swarm.run(LIMIT_S)
        made_of = sorted(one["batch"] for one in lineage(swarm.log).records if one["kind"] == "commit")
        require(made_of == list(range(shaped.steps)), f"by its log the result is made of batches {made_of}")
        by_log, folded = _credit(swarm.log), swarm.checks.credit.of
        require(by_log == folded, f"{folded} is credited, and by its log {by_log}")
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        violation = f"{type(error).__name__}: {error}"
    return HistoryOutcome.of(seed, violation, swarm)


def _credit(log: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Credit by the lineage of a log's result, as the audit counts it."""
    contributors = Contributors()
    for record in log:
        contributors.add(record)
    made_of = (one["counted"] for one in lineage(log).records if one["kind"] == "commit")
    return sum((Counter(dict(contributors.read(counted))) for counted in made_of), Counter())


class GroupedChecks(Checks):
    """Invariants of one history of a grouped run."""

    more_versions = 1

    def __init__(self, numerics: Any, config: HistoryConfig, coverage: Coverage) -> None:
        super().__init__(numerics, config, coverage)
        self.credit = Credit(grouped=config.steps)
        self._sparse = config.sparse
        self._term = 0
        self._inside: dict[int, list[frozenset[tuple[int, int]]]] = {}
        """Living cluster → version by version what is in it: (batch, which training of it)."""
        self._base: dict[int, int] = {}
        """Cluster → the version from which it began."""
        self._stored: tuple[int, frozenset[tuple[int, int]]] = (0, frozenset())
        self._promised: dict[int, frozenset[tuple[int, int]]] = {}
        """Cluster → what is in the mean that it has not yet installed."""
        self._trained: Counter[int] = Counter()
        self._averages: dict[tuple[int, int, int], frozenset[int]] = {}
        """(cluster, view, step) → the clusters that averaged in it."""
        self._own: dict[int, int] = {}
        """Cluster → version of the last checkpoint, if that is in its history."""
        self._lives: dict[tuple[int, int], int] = {}
        """Cluster and view → how often it had gone back to a checkpoint."""
        self._anchors: dict[int, list[tuple[int, int]]] = {}
        """Cluster → (version, number of means in it), rising."""
        self._stored_anchor = 0
        self._behind: frozenset[int] = frozenset()
        """Living clusters that the last sparse averaging was without: they must not do anything any more."""
        self._batches: dict[tuple[int, int, int], int] = {}
        """(cluster, view, step) → the batch."""
        self._after: dict[tuple[int, int, int, int], str] = {}
        """(cluster, how often it had gone back, version, block) → digest of the state."""

    def recorded(self, record: Mapping[str, Any]) -> None:
        kind, cluster = record["kind"], record.get("cluster", 0)
        acts = kind in ("commit", "checkpoint") and cluster in self._behind
        require(not acts, f"cluster {cluster} goes on though the others have averaged without it")
        match kind:
            case "reign":
                require(record["term"] > self._term, f"term {record['term']} after {self._term}")
                self._term = record["term"]
                self._promised.clear()
            case "founded":
                version, stored = self._stored
                require(record["version"] == version, f"cluster {cluster} begins at {record['version']}")
                require(cluster not in self._inside, f"cluster {cluster} is founded twice")
                require(self._fits(stored), f"cluster {cluster} begins with what others have trained again")
                self._base[cluster], self._inside[cluster] = version, [stored]
                self._own[cluster], self._lives[cluster, 0] = version, 0
                self._anchors[cluster] = [(version, self._stored_anchor)]
            case "commit":
                batch, step = record["batch"], record["step"]
                self._grows(cluster, step)
                view, versions = record["view"], range(step - record.get("behind", 0), step)
                means = sum((cluster, view, number) in self._averages for number in versions)
                require(means <= 1, f"step {step} began {means} means ago")
                self.is_fresh_enough(step - self._base[cluster], batch, record, means)
                ids = self.counts(batch)
                exact = self._numerics.check_loss(batch, ids, record["loss"])
                require(exact, f"batch {batch} has the loss {record['loss']}")
                known = {b for known in self._known() for b, _ in known}
                require(batch not in known, f"batch {batch} is trained though it is somewhere")
                self._trained[batch] += 1
                self._batches[cluster, view, step] = batch
                self.gives((cluster, view, step), record)
                self._inside[cluster].append(self._inside[cluster][-1] | {(batch, self._trained[batch])})
            case "average" | "installed":
                copies = dict(record["clusters"])
                if kind == "average" and self._sparse:
                    self._is_of_all(copies, record)
                if kind == "average":
                    mean = [self._inside[number][at - self._base[number]] for number, at in copies.items()]
                    self._promised |= dict.fromkeys(copies, frozenset().union(*mean))
                for number, step in record["installed"]:
                    self._grows(number, step)
                    self._anchors[number].append((step + 1, self._anchors[number][-1][1] + 1))
                    self._averages[number, view_in(record, number), step] = frozenset(copies)
                    self._inside[number].append(self._inside[number][-1] | self._promised.pop(number))
            case "checkpoint":
                at = record["version"] - self._base[cluster]
                self._stored, self._own = (record["version"], self._inside[cluster][at]), {}
                self._own[cluster] = record["version"]
                self._stored_anchor = max(n for v, n in self._anchors[cluster] if v <= record["version"])
            case "dissolved":
                before = frozenset().union(*self._known())
                self._inside.pop(cluster, None)
                self._promised.pop(cluster, None)
                kept = record["why"] != WHY or before == frozenset().union(*self._known())
                require(kept, f"something is lost with cluster {cluster}, which is divided anew")
            case "rollback":
                self._goes_back(cluster, record["view"], record["to_version"])
            case _:
                pass
        everything = frozenset().union(*self._known()) if self._inside else self._stored[1]
        self.credit_adds_up(record, (batch for batch, _ in everything))

    def _goes_back(self, cluster: int, view: int, version: int) -> None:
        """It goes on from its version, or from the last checkpoint if that is its own; promises are void."""
        life, inside = max(life for (one, _), life in self._lives.items() if one == cluster), self._inside
        latest = self._base[cluster] + len(inside[cluster]) - 1
        self._promised.pop(cluster, None)
        if version != latest:
            where = f"from {latest} to {version}, and its checkpoint is {self._own.get(cluster)}"
            require(self._own.get(cluster) == version, f"cluster {cluster} goes back {where}")
            life += 1
            del inside[cluster][version - self._base[cluster] + 1 :]
            self._anchors[cluster] = [(v, n) for v, n in self._anchors[cluster] if v <= version]
            for block in range(self._numerics.blocks):
                if (cluster, life - 1, version, block) in self._after:
                    self._after[cluster, life, version, block] = self._after[
                        cluster, life - 1, version, block
                    ]
        self._lives[cluster, view] = life

    def _is_of_all(self, copies: Mapping[int, int], record: Mapping[str, Any]) -> None:
        """A sparse averaging is of clusters with one anchor, all install it, and no other one goes on."""
        anchors = {number: self._anchors[number][-1][1] for number in copies}
        require(len(set(anchors.values())) == 1, f"anchors {anchors} are averaged")
        self._behind = frozenset(self._inside.keys() - copies.keys())
        late = copies.keys() - dict(record["installed"]).keys()
        require(not late, f"clusters {late} do not install it at once")

    def _grows(self, cluster: int, step: int) -> None:
        version = self._base[cluster] + len(self._inside[cluster]) - 1
        require(step == version, f"step {step} is committed at version {version} of cluster {cluster}")

    def _fits(self, stored: frozenset[tuple[int, int]]) -> bool:
        others = frozenset().union(*self._known())
        return len({batch for batch, _ in stored | others}) == len(stored | others)

    def _known(self) -> list[frozenset[tuple[int, int]]]:
        """Batches in each living cluster, and those that will be in them."""
        return [*(inside[-1] for inside in self._inside.values()), *self._promised.values()]

    def applied(self, volunteer: str, record: RecordApplied, before: Digests) -> None:
        step, number = record.step, record.step.number
        cluster, view = step.line.cluster, step.line.view
        if not step.group:
            self.credited((cluster, view, number), record.covers)
        members = self._averages.get((cluster, view, number))
        if step.group:
            require(members is not None, f"{volunteer} averaged in step {number} uncommitted")
        else:
            decided = self._batches.get((cluster, view, number))
            require(decided == step.batch, f"{volunteer} applied step {number}")
        for cover in record.covers:
            where = f"cluster {cluster} step {number} block {cover.block}"
            ids = Counter(i for _, held in cover.slots for i in held)
            expected = members if members is not None else self.counts(step.batch)
            require(ids == Counter(expected), f"{where}: counted {dict(ids)}")
            key = cluster, self._lives[cluster, view]
            known = self._after.setdefault((*key, number, cover.block), before[cover.block])
            require(known == before[cover.block], f"{where}: {volunteer} applied it to another state")
            after = record.states[cover.block]
            known = self._after.setdefault((*key, number + 1, cover.block), after)
            require(known == after, f"{where}: holders differ at {volunteer}")

    def ended(self, states: Mapping[int, Any]) -> None:
        everything = set(range(self._steps))
        for inside in self._inside.values():
            found = [batch for batch, _ in inside[-1]]
            require(len(found) == len(set(found)), f"a batch is in twice: {sorted(found)}")
            require(set(found) == everything, f"batches {everything - set(found)} are missing")
        for block, state in states.items():
            if isinstance(state, CheckedState):
                require(state.batches == everything, f"block {block} lacks {everything - state.batches}")


class GroupedSwarm(CheckedSwarm):
    """One history of a grouped run: `config.steps` batches."""

    checks: GroupedChecks
    checks_class = GroupedChecks

    def __init__(
        self,
        seed: int,
        config: HistoryConfig,
        numerics: Any,
        coverage: Any,
        span: int = SPAN,
        interval: int = 1,
        delayed: bool = False,
        spare_s: float = SPARE_S[0],
    ) -> None:
        super().__init__(seed, config, numerics, coverage)
        self._span, self._wait = span, WAIT[seed // 8 % 2]
        self._interval, self._delayed = interval, delayed
        self._spare_s = spare_s

    def _new_core(self) -> Core:
        window = WaitWindow(math.inf) if self.config.sparse else Adaptive(self._span, self._wait)
        scheduler = GroupPipelines(1, (), self._span, window)
        config = replace(
            self._core_config(),
            averaging_interval=self._interval,
            averaging_delayed=self._delayed,
            spare_s=self._spare_s,
            gather_s=GATHER_S if self.config.arranged_s else 0.0,
        )
        return GroupedRun(config, self.log, scheduler, self.world.now)

    def _check_promise(self, to: str, message: m.Message) -> None:
        """Also that a volunteer which is told of a mean has it, if it is still at the averaged version."""
        super()._check_promise(to, message)
        if not (isinstance(message, m.Commit) and message.group):
            return
        volunteer = self.volunteers[to]
        member, same = volunteer.member, volunteer.alive and self._channels.get(to) == volunteer.session
        stands = (member.line, member.version) == (message.line, message.step) and member.phase in AT_WORK
        require(
            not (same and stands) or member.work.holds(message),
            f"{to} is told of the mean of group {message.group}, which it does not have",
        )

    def _is_past(self, core: Core, message: m.Message) -> bool:
        assert isinstance(core, GroupedRun)
        theirs = getattr(message, "line", None)
        cluster = core.clusters.get(theirs.cluster) if isinstance(theirs, m.TermView) else None
        if cluster is None:
            return isinstance(theirs, m.TermView) and theirs.cluster != m.EVERYBODY
        return is_past(message, cluster.line, cluster.history.version)
