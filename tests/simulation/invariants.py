"""Invariants of every history, checked while it happens.

* An update is the sum of exactly the step's ids (F1), the same bits at every holder (F2), on the one state
  that the log's surviving history names (no holder of another term or view takes part).
* A step is computed with a version that is at most as old as the run allows, and by everybody with the
  same one.
* The log grows by one step at a time, terms and views only rise, and its losses are those of all
  microbatches.
* A plan names live holders only, each with exactly the ids that its accepted slot is made of, and every
  holder that is told a commit has the gradients that it names (F3: a committed result has a copy).
* A commit credits each peer with its own part of the applied sums; all credit together is that of the
  surviving commits.
* No backup is in the roster of a step.
* One machine that adds in the order that the covers name gets every gradient and state, bit by bit.
* A holder never keeps more than three live slots of a block, and never an id in two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import RecordApplied
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.log.credit import Contributors, Credit, work_in
from hetpeer.bootstrap.log.history import History
from hetpeer.peer.simulate.sim_hooks import SimObserver, ViolationError
from hetpeer.stages.pipeline.gradient_slots import LIVE, GradientSlots
from tests.simulation.checked_symbols import CheckedNumerics
from tests.simulation.computed_again import differences
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage

FALSE_DIGESTS = frozenset({"votes", "denies", "flips"})
"""Lies about digests: where it is word against word, the log may have the liar's."""
Digests = Mapping[int, str]
"""Block → digest of a state."""


class Checks(SimObserver):
    """Watches one history of a run, and counts in `coverage` what it reaches."""

    more_versions = 0
    """Versions of a block that a volunteer may keep beside those of steps that overlap."""

    def __init__(self, numerics: CheckedNumerics, config: HistoryConfig, coverage: Coverage) -> None:
        self._coverage = coverage
        self._numerics = numerics
        self._steps = config.steps
        self._microbatches = config.microbatches
        self._fails_at = config.fails_at
        self._staleness = config.staleness
        self._delays = config.delays
        self._fresh = config.fresh_steps
        self._ties = Ties(config.ties)
        self._false_digests = any(config.told_by(peer) & FALSE_DIGESTS for peer in config.lies)
        self.history = History()
        self._commits = 0
        self._lineage = {0: 0}
        """Version → the commit that made it, in the surviving history; 0 is the beginning."""
        self._parents: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(term, view, step) → the commit that made the version before, and this one."""
        self._behind: dict[tuple[int, int, int], int] = {}
        """(term, view, step) → by how many versions its parameters were behind."""
        self._states = {(0, b): numerics.digest(numerics.initial(b)) for b in range(numerics.blocks)}
        """(commit, block) → digest of the state."""
        self.credit = Credit()
        self._contributors = Contributors()
        self._given: dict[Hashable, Mapping[str, int]] = {}
        """Commit → peer → credit."""
        self._summed: dict[Hashable, dict[int, m.Cover]] = {}
        """Commit → block → cover that was applied."""

    def coordinator_event(self, state: str, event: str) -> None:
        self._coverage.coordinator[state, event] += 1

    def member_message(self, phase: str, kind: str) -> None:
        self._coverage.member[phase, kind] += 1

    def recorded(self, record: Mapping[str, Any]) -> None:
        """One more record lies durably in the log."""
        history, kind = self.history, record["kind"]
        if kind == "reign":
            require(record["term"] > history.term, f"term {record['term']} after {history.term}")
        elif kind == "rollback":
            require(record["view"] > history.view, f"view {record['view']} after {history.view}")
            kept = record["to_version"]
            self._lineage = {v: c for v, c in self._lineage.items() if v <= kept}
        elif kind == "moved":
            require(history.moves[-1:] and history.moves[-1].result is None, "what was moved had settled")
            require((record["after_s"] is None) != (record["why"] == ""), f"it is judged or not: {record}")
        elif kind == "commit":
            step = record["step"]
            require(step == history.version, f"step {step} is committed at version {history.version}")
            ids = self.counts(step)
            exact = self._numerics.check_loss(step, ids, record["loss"])
            left_out = [i for i in range(self._microbatches) if i not in ids]
            require(record.get("skipped", []) == left_out, f"step {step} skips {record.get('skipped')}")
            require(exact, f"step {step} has the loss {record['loss']}")
            self.is_fresh_enough(step, step, record)
            self._commits += 1
            key = (record["term"], record["view"], step)
            self._parents[key] = (self._lineage[step], self._commits)
            self._behind[key] = record.get("behind", 0)
            self._lineage[step + 1] = self._commits
            self.gives(key, record)
            self.works_without_backups(record)
        history.add(record)
        self.credit_adds_up(record, history.commits)

    def works_without_backups(self, record: Mapping[str, Any]) -> None:
        """Check that no volunteer of the roster is a backup by the log."""
        backups = {peer for peer, _ in self._contributors.held(record["held"])} & self.history.backups
        require(not backups, f"step {record['step']} has backups in its roster: {sorted(backups)}")

    def gives(self, commit: Hashable, record: Mapping[str, Any]) -> None:
        """Note the credit that the record of `commit` gives."""
        self._contributors.add(record)
        self._given[commit] = dict(self._contributors.read(record["counted"]))

    def counts(self, batch: int) -> list[int]:
        """Ids of `batch` that somebody can compute: exactly these are in its update."""
        return [i for i in range(self._microbatches) if self._fails_at(batch, i) is None]

    def credit_adds_up(self, record: Mapping[str, Any], batches: Iterable[int]) -> None:
        """Check all credit after `record`: `batches` in the result give each of their block-microbatches
        once.
        """
        self.credit.add(record)
        given, due = self.credit.of, sum(len(self.counts(one)) for one in batches) * self._numerics.blocks
        require(sum(given.values()) == due, f"{sum(given.values())} are credited, and not {due}")
        require(min(given.values(), default=1) > 0, f"{given} is credited")

    def credited(self, commit: Hashable, covers: Collection[m.Cover]) -> None:
        """Check the credit of `commit` against the covers that were applied for it."""
        summed = self._summed.setdefault(commit, {})
        summed |= {cover.block: cover for cover in covers}
        if len(summed) == self._numerics.blocks:
            sizes = dict.fromkeys(range(self._microbatches), 1)
            work = work_in((cover.slots for cover in summed.values()), sizes)
            require(work == self._given[commit], f"{commit} gives {self._given[commit]}, and counts {work}")

    def is_fresh_enough(self, step: int, batch: int, record: Mapping[str, Any], means: int = 0) -> None:
        """Check that the parameters of a committed step are of a version that existed and is not too old.

        `means`: versions since then that were made by installing a mean.
        """
        behind = record.get("behind", 0) - means
        most = min(step, self._staleness) if batch >= self._fresh else 0
        require(0 <= behind <= most, f"step {step} is {behind} updates behind")

    def applied(self, volunteer: str, record: RecordApplied, before: Digests) -> None:
        """`volunteer` has applied a committed update to the states `before`."""
        line, step = record.step.line, record.step.number
        require((line.term, line.view, step) in self._parents, f"{volunteer} applied step {step} uncommitted")
        parent, commit = self._parents[line.term, line.view, step]
        behind = self._behind[line.term, line.view, step]
        require(
            behind == record.step.behind,
            f"{volunteer} computed step {step} {record.step.behind} versions behind",
        )
        for cover in record.covers:
            where = f"step {step} block {cover.block}"
            ids = Counter(i for _, held in cover.slots for i in held)
            require(ids == Counter(self.counts(step)), f"{where}: counted {dict(ids)}")
            known = self._states.setdefault((parent, cover.block), before[cover.block])
            require(known == before[cover.block], f"{where}: {volunteer} applied it to another state")
            after = record.states[cover.block]
            known = self._states.setdefault((commit, cover.block), after)
            require(known == after, f"{where}: holders differ at {volunteer}")
        self.credited((line.term, line.view, step), record.covers)

    def keeps(self, volunteer: str, versions: int, steps: int) -> None:
        """`volunteer` keeps so many versions of a block, and works on so many steps."""
        most = self._staleness + 1
        enough = most + self.more_versions
        too_many = f"{volunteer} keeps {versions} versions of a block, and {enough} are enough"
        require(versions <= enough, too_many)
        require(steps <= most, f"{volunteer} works on {steps} steps, and {most} may overlap")

    def planned(self, roster: Collection[str], plan: m.Plan) -> None:
        """The coordinator makes a plan."""
        for cover in plan.covers:
            holders = {holder for holder, _ in (*cover.slots, *cover.reducers)} | {*cover.receivers}
            require(
                holders <= set(roster), f"plan {plan.plan} of step {plan.step} names {holders - set(roster)}"
            )

    def plan_arrived(self, volunteer: str, slots: GradientSlots, plan: m.Plan) -> None:
        """`volunteer` is told the plan of its step; slots that it refers to were settled before."""
        accepted = slots.accepted()
        mine = {} if accepted is None else slots.contents()[accepted]
        for cover in plan.covers:
            named = frozenset(dict(cover.slots).get(volunteer, ()))
            require(
                named == mine.get(cover.block, frozenset()),
                f"plan {plan.plan} of step {plan.step} takes {volunteer} for a holder of {set(named)}",
            )

    def committed(self, volunteer: str, *, holds: bool) -> None:
        """`volunteer` is told a commit of the step that it works on."""
        require(holds, f"{volunteer} is told a commit and does not hold its gradients")

    def folding(self, volunteer: str, slots: GradientSlots, blocks: range) -> None:
        """A backward starts; its gradients are to be folded into a slot."""
        for block in blocks:
            live = [held[block] for held in slots.contents().values() if block in held]
            require(len(live) <= LIVE, f"{volunteer} keeps {len(live)} slots of {block}")
            ids = Counter(i for held in live for i in held)
            require(max(ids.values(), default=0) <= 1, f"{volunteer} has an id in two slots of {block}")

    def ended(self, states: Mapping[int, Any]) -> None:
        """The run is over; `states` is the last checkpoint."""
        require(sorted(self.history.commits) == list(range(self._steps)), "not every step is committed")
        commits = self.history.commits
        for block, state in states.items():
            bases = [
                {i: self._base(step, commits[step], i, block) for i in self.counts(step)}
                for step in range(self._steps)
            ]
            exact = self._numerics.check_final(block, bases, state)
            require(exact, f"block {block} ended in another state than that of one machine")
        if not self._false_digests:
            self._is_computed_again()

    def _is_computed_again(self) -> None:
        """One machine that adds in the order of the covers gets all gradients and states, bit by bit."""
        commits = [self.history.commits[step] for step in range(self._steps)]
        keys = [(commit["term"], commit["view"], step) for step, commit in enumerate(commits)]
        found = differences(
            self._numerics,
            self._ties,
            [(self._summed[key], commit) for key, commit in zip(keys, commits, strict=True)],
            lambda step, i, block: self._base(step, commits[step], i, block),
            lambda version, block: self._states[self._lineage[version], block],
        )
        require(not found, "; ".join(found))

    def _base(self, step: int, commit: Mapping[str, Any], microbatch: int, block: int) -> int:
        """Version of `block` that a microbatch of `step` is computed with."""
        return step - self._delays.behind(commit.get("behind", 0), microbatch, block)


def require(holds: bool, what: str) -> None:
    """Raise `ViolationError` with the text `what` unless it `holds`."""
    if not holds:
        raise ViolationError(what)
