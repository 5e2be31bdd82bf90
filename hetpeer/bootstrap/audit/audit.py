"""`hetpeer audit`: was every microbatch counted exactly once? Answered from the volunteers' own signed logs.

For each step that survives in the coordinator's log, each block's holders state which ids were in the
gradient they applied, the gradient's digest and the digest of the new state. The audit counts those ids and
does not trust the coordinator about them. The majority of the holders of an update counts; a volunteer that
signed something else is named. Each rule below is a promise of docs/protocol.md, by its name there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetpeer.bootstrap.audit.log_checks import (
    Breach,
    MajorityStatements,
    check_credit,
    out_of_order,
    undecided,
)
from hetpeer.bootstrap.log.contributions import Contribution, ContributionLog, Tally
from hetpeer.bootstrap.log.evidence import AppliedEvent, Evidence, Key, LeftoverEvent
from hetpeer.bootstrap.log.history import Decision, History, Means, Record, decisions_of
from hetpeer.bootstrap.log.lineage import lineage
from hetpeer.bootstrap.log.moves import Move
from hetpeer.bootstrap.log.record_log import in_use, read_log
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.run_directory import RunDirectory

MAX_PROBLEMS = 100
"""Largest number of listed problems; the counts include all."""
ON_THE_WAY = 16
"""Newest committed steps of a cluster that volunteers may not have reported yet while the run is not over."""

RULES: Mapping[str, str] = {
    "F1": "each microbatch is counted once at each block of each committed step, except those that it skips",
    "F2": "all holders of a block apply the same gradient, the committed one, and get the same state",
    "F3": "what was committed was applied at every block by somebody",
    "F4": "a checkpoint is made of states that holders had at that version",
    "F5": "who was given up changes nothing: nobody applies under an incarnation that it has left",
    "F6": "one coordinator at a time decides one step after the other",
    "G1": "no batch of a grouped run is in its parameters twice",
    "S1": "each step is computed with parameters that are as old as was decided, and no older than the run "
    "allows",
    "I3": "nothing is applied that was not decided",
    "I5": "a run goes back to its last complete checkpoint only",
    "C1": "a commit credits each peer with what is its own in the sums that were applied",
}
"""Rules of docs/protocol.md that logs can show; C1 is from docs/credit.md. I2 is F1 at all steps."""


@dataclass(slots=True)
class AuditVerdict:
    """Result of the audit. `ok` is the answer; the other fields give the reasons."""

    run: str
    steps_planned: int
    steps: int = 0
    """Committed steps of the surviving history, without the awaited ones."""
    awaited: int = 0
    """Newer steps that are not judged: the run is not over, and reports on them are still missing."""
    rollbacks: int = 0
    microbatches_expected: int = 0
    """Microbatches of the committed steps, without the skipped ones."""
    skipped: int = 0
    """Microbatches that commits skip because they cannot be computed."""
    counted: int = 0
    """Microbatches that are in the gradient of every block exactly once."""
    lost: int = 0
    """Microbatches missing at one block at least."""
    duplicated: int = 0
    """Microbatches counted twice or more at one block at least."""
    leftovers: int = 0
    """Microbatches that reached a holder through the task board and are counted there."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Staleness in updates → number of committed steps."""
    contributed: Tally = field(default_factory=Tally)
    """Counts of used, late and lost contributions."""
    contributions: list[Contribution] | None = None
    """All contributions, if requested."""
    volunteers: int = 0
    events: int = 0
    unit: str = ""
    """Unit of credit, per block."""
    credit: dict[str, int] = field(default_factory=dict)
    """Peer → credit in the surviving commits, by the coordinator's log; largest first."""
    moves: list[Move] = field(default_factory=list)
    """The newest moves of blocks by the coordinator's log: what each promised, and what came."""
    outvoted: list[str] = field(default_factory=list)
    """A line per volunteer against the majority, or with an uncommitted update; no fault of the run."""
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0
    broken: dict[str, int] = field(default_factory=dict)
    """Rule → number of problems that break it."""

    @property
    def ok(self) -> bool:
        """Whether no rule is broken and each expected microbatch is counted."""
        return self.problem_count == 0 and self.counted == self.microbatches_expected

    def complain(self, problem: str, rule: str = "") -> None:
        """Add `problem`, and count it under `rule`; only the first MAX_PROBLEMS texts are kept."""
        self.problem_count += 1
        if rule:
            self.broken[rule] = self.broken.get(rule, 0) + 1
        if self.problem_count <= MAX_PROBLEMS:
            self.problems.append(problem)


def audit(directory: Path, *, contributions: bool = False) -> AuditVerdict:
    """Check a run directory: its files, its log and the volunteers' logs in `volunteers/`.

    `contributions`: list all of them, too. Before the run is over, also while it is served, the audit
    judges the steps up to the last one that was reported for all blocks.

    Raises `LocalError` when the manifest, a file it names or the coordinator's log is damaged; what is wrong
    with the history or with a volunteer's log is a problem in the verdict.
    """
    run = RunDirectory.open(directory)
    run.verify()
    training, blocks = run.manifest.training, len(run.manifest.blocks)
    served = in_use(run.log_path)
    records = list(read_log(run.log_path))
    history = History.of(records)
    said = Evidence.read(run.volunteers, run.run_id)
    heard = MajorityStatements.of(said.applied)
    decided = list(read_log(run.log_path)) if served else records
    """The log read again after the evidence: a run in progress may have decided more by then."""
    verdict = AuditVerdict(
        run=run.run_id,
        steps_planned=run.manifest.training.steps,
        rollbacks=sum(record["kind"] == "rollback" for record in records),
        volunteers=said.volunteers,
        events=said.updates,
        unit=run.manifest.data.unit,
        moves=history.moves,
        outvoted=list(heard.findings({one.key for record in decided for one in decisions_of(record)})),
    )
    for line in said.unsound:
        verdict.complain(line)
    for problem, rule in (*out_of_order(records), *undecided(decided, said.applied)):
        verdict.complain(problem, rule)
    surviving = _surviving(run.manifest, records, verdict)
    over = not served and _is_over(training.steps, surviving, records)
    told, awaited = (surviving, []) if over else _told(surviving, said.applied, blocks)
    verdict.awaited = sum(one.trains for one in awaited)
    _check_steps(run.manifest, told, heard, Means(records), verdict)
    plan = run.weighted_plan()
    for one in told:
        weights = plan.training_weights(one.batch) if one.skipped else ()
        for microbatch in one.skipped:
            if (one.batch, microbatch) not in history.bad and weights[microbatch]:
                verdict.complain(f"{one} skips microbatch {microbatch}, and the log does not say why", "F1")
    _check_credit(run.manifest, told, records, heard.applied, verdict)
    _check_checkpoints(records, heard.applied, {(one.cluster, one.step + 1) for one in awaited}, verdict)
    _check_lives(said.lives, verdict)
    verdict.leftovers = len(_counted_leftovers(records, said.found, heard.applied))
    each = ContributionLog(
        records, surviving, heard.applied, training.microbatches, blocks, run.manifest.delays
    )
    verdict.contributed = each.tally()
    verdict.contributions = list(each) if contributions else None
    return verdict


def _check_steps(
    manifest: Manifest,
    surviving: Sequence[Decision],
    heard: MajorityStatements,
    means: Means,
    verdict: AuditVerdict,
) -> None:
    """F1 to F3: count the microbatches of each step in the result, and the clusters of each averaging."""
    trained = [one for one in surviving if one.trains]
    microbatches = range(manifest.training.microbatches)
    verdict.steps = len(trained)
    verdict.skipped = sum(len(one.skipped) for one in trained)
    verdict.microbatches_expected = verdict.steps * len(microbatches) - verdict.skipped
    if not verdict.steps:
        nothing = "not everything has been told yet of any committed step"
        verdict.complain(nothing if verdict.awaited else "no step was committed")
    for one in trained:
        stale = means.updates_behind(one.cluster, one.view, one.step, one.behind)
        verdict.staleness[stale] = verdict.staleness.get(stale, 0) + 1
        batch = one.step if manifest.averaging is None else one.batch  # an exact one's batch is its step
        if one.behind < 0 or stale > manifest.training.most_behind(one.step, batch):
            verdict.complain(f"{one} is of parameters {stale} updates old", "S1")
    for one in surviving:
        expected = {*microbatches} - {*one.skipped} if one.trains else one.clusters
        tallies = []
        for block in range(len(manifest.blocks)):
            events = heard.applied.get((*one.key, block), [])
            tallies += [event.tally() for event in events] or [Counter()]
            base = one.step - manifest.delays.behind(one.behind, 0, block)
            torn = heard.torn.get((*one.key, block), ())
            for problem, rule in _contradictions(one, block, base, events, torn):
                verdict.complain(f"{one} block {block}: {problem}", rule)
        _count(one, set(expected), tallies, verdict)


def _count(one: Decision, expected: set[int], tallies: Sequence[Counter[int]], verdict: AuditVerdict) -> None:
    """F1: each `expected` microbatch, or cluster, is in every holder's tally of every block exactly once."""
    lost = {m for m in expected if any(tally[m] == 0 for tally in tallies)}
    duplicated = {m for m in expected if any(tally[m] > 1 for tally in tallies)}
    strangers = {m for tally in tallies for m in tally if m not in expected}
    if one.trains:
        verdict.lost += len(lost)
        verdict.duplicated += len(duplicated)
        verdict.counted += len(expected) - len(lost | duplicated)
    for what, found in (("lost", lost), ("counted twice", duplicated), ("unknown", strangers)):
        if found:
            names = ", ".join(map(str, sorted(found)))
            kind = "microbatches" if one.trains else "clusters"
            verdict.complain(f"{one}: {kind} {what}: {names}", "F1")


def _check_credit(
    manifest: Manifest,
    surviving: Sequence[Decision],
    records: Sequence[Record],
    applied: Mapping[Key, list[AppliedEvent]],
    verdict: AuditVerdict,
) -> None:
    """C1, and each peer's credit."""
    training = manifest.training
    sizes = {number: training.samples_of(number) for number in range(training.microbatches)}
    credit, problems = check_credit(surviving, records, applied, sizes, len(manifest.blocks))
    verdict.credit = {peer: n * manifest.data.tokens_per_sample for peer, n in credit.most_common()}
    for problem in problems:
        verdict.complain(problem, "C1")


def _surviving(manifest: Manifest, records: Sequence[Record], verdict: AuditVerdict) -> list[Decision]:
    """Decisions behind the run's parameters. In a grouped run no batch may be in them twice."""
    if manifest.averaging is None:
        history = History.of(records)
        steps = [history.commits.get(step, _gap(step)) for step in range(history.version)]
        return [one for commit in steps for one in decisions_of(commit)]
    found = lineage(records)
    if found.twice:
        names = ", ".join(map(str, sorted(found.twice)))
        verdict.complain(f"batches that are in the parameters twice: {names}", "G1")
    return list(found.decisions)


def _is_over(steps: int, surviving: Iterable[Decision], records: Sequence[Record]) -> bool:
    """Whether all is trained and stored. Holders report an update before they save its state."""
    kinds = [r["kind"] for r in records if r["kind"] in ("commit", "average", "installed", "checkpoint")]
    return sum(one.trains for one in surviving) >= steps and kinds[-1:] == ["checkpoint"]


def _told(
    surviving: Sequence[Decision], applied: Mapping[Key, list[AppliedEvent]], blocks: int
) -> tuple[list[Decision], list[Decision]]:
    """Decisions reported at all blocks, with their cluster's older ones; and its ≤ ON_THE_WAY newer ones."""
    awaited: dict[int, list[Decision]] = {}
    over: set[int] = set()
    for one in reversed(surviving):
        others = awaited.setdefault(one.cluster, [])
        if len(others) == ON_THE_WAY or all(applied.get((*one.key, block)) for block in range(blocks)):
            over.add(one.cluster)
        elif one.cluster not in over:
            others.append(one)
    late = {one.key for others in awaited.values() for one in others}
    return [one for one in surviving if one.key not in late], [one for one in surviving if one.key in late]


def _gap(step: int) -> Record:
    """Placeholder for a commit that the log lacks; nobody can have applied it."""
    return {"kind": "commit", "view": 0, "step": step, "plan": -1, "gradients": {}}


def _contradictions(
    one: Decision, block: int, base: int, events: Sequence[AppliedEvent], torn: Sequence[str]
) -> Iterator[Breach]:
    """F2, F3, S1: contradictions among the holders of a block at a step, and between them and the commit.

    `base`: the version that the block was to be computed with; `torn`: volunteers with statements on it if
    there is no majority.
    """
    if not events:
        yield "no volunteer says it applied a committed plan", "F3"
        return
    if one.trains and {event.base for event in events} - {None, base}:
        yield "computed with another version than was decided", "S1"
    if torn:
        yield f"nothing is what most say: {', '.join(torn)} contradict each other", "F2"
    if any(event.gradient != one.digests.get(block) for event in events):
        yield "the gradient applied is not the gradient committed", "F2"
    if len({event.gradient for event in events}) > 1:
        yield "the holders' gradients differ", "F2"
    if len({event.state for event in events}) > 1:
        yield "the holders' states differ", "F2"


def _check_checkpoints(
    records: Iterable[Record],
    applied: Mapping[Key, list[AppliedEvent]],
    awaited: Collection[tuple[int, int]],
    verdict: AuditVerdict,
) -> None:
    """F4: a checkpoint has the states that holders reported; `awaited` (cluster, version) is not judged."""
    states = {(event.step + 1, event.block, event.state) for events in applied.values() for event in events}
    for record in records:
        if record["kind"] == "checkpoint" and (record.get("cluster", 0), record["version"]) not in awaited:
            for block, digest in enumerate(record["blocks"]):
                if (record["version"], block, digest) not in states:
                    problem = f"checkpoint {record['version']} block {block}: no holder had that state"
                    verdict.complain(problem, "F4")


def _check_lives(lives: Mapping[str, Sequence[AppliedEvent]], verdict: AuditVerdict) -> None:
    """F5: a volunteer's incarnations rise in its log, and it applies each step of a block once per view."""
    for peer, events in lives.items():
        incarnation = 0
        done: set[tuple[int, int, int, int]] = set()
        for event in events:
            where = f"{peer}: step {event.step} block {event.block}"
            if event.incarnation < incarnation:
                left = f"incarnation {event.incarnation}, which it had left"
                verdict.complain(f"{where} was applied under {left}", "F5")
            incarnation = max(incarnation, event.incarnation)
            key = (event.cluster, event.view, event.step, event.block)
            if key in done and event.incarnation == incarnation:
                verdict.complain(f"{where} was applied twice in view {event.view}", "F5")
            done.add(key)


def _counted_leftovers(
    records: Sequence[Record], found: Iterable[LeftoverEvent], applied: Mapping[Key, list[AppliedEvent]]
) -> set[tuple[int, int, int]]:
    """(cluster, step, id) of microbatches that a volunteer found on the task board and contributed."""
    plans = {(one.cluster, one.view, one.step): one.plan for r in records for one in decisions_of(r)}
    return {
        (one.cluster, one.step, microbatch)
        for one in found
        for event in applied.get(
            (one.cluster, one.view, one.step, plans.get((one.cluster, one.view, one.step), 0), one.border), []
        )[:1]
        for holder, ids in event.cover
        if holder == one.peer
        for microbatch in set(ids).intersection(one.ids)
    }
