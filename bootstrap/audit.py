"""`hetpeer audit`: was every microbatch counted exactly once? Answered from the volunteers' own signed logs.

For each step that survives in the coordinator's log, each block's holders say which ids were in the gradient they
applied, which gradient it was and which state came out. The audit counts those ids; it does not take the coordinator's
word for them. Each rule below is a promise of docs/protocol.md, by its name there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetpeer.bootstrap.history import History, Record
from hetpeer.bootstrap.log import read_log
from hetpeer.bootstrap.manifest import Manifest
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.testimony import Applied, Key, Testimony

MAX_PROBLEMS = 100
"""Problems listed one by one; the counts go on."""

RULES: Mapping[str, str] = {
    "F1": "each microbatch is counted once at each block of each committed step",
    "F2": "all holders of a block apply the same gradient, the committed one, and get the same state",
    "F3": "what was committed was applied at every block by somebody",
    "F4": "a checkpoint is made of states that holders had at that version",
    "F5": "who was given up changes nothing: nobody applies under an incarnation that it has left",
    "F6": "one coordinator at a time decides one step after the other",
    "I3": "nothing is applied that was not decided",
    "I5": "a run goes back to its last complete checkpoint only",
}
"""Of docs/protocol.md, as far as logs can show them. I2 is F1 at all steps."""


@dataclass(slots=True)
class Verdict:
    """What the audit found. `ok` is the answer; the rest says why."""

    run: str
    steps_planned: int
    steps: int = 0
    """Committed steps of the surviving history."""
    rollbacks: int = 0
    microbatches_expected: int = 0
    counted: int = 0
    """Microbatches that are in the gradient of every block exactly once."""
    lost: int = 0
    """Microbatches missing at one block at least."""
    duplicated: int = 0
    """Microbatches counted twice or more at one block at least."""
    leftovers: int = 0
    """Microbatches that reached a holder through the task board and are counted there."""
    volunteers: int = 0
    events: int = 0
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0
    broken: dict[str, int] = field(default_factory=dict)
    """Rule → how many problems show that it was broken."""

    @property
    def ok(self) -> bool:
        return self.problem_count == 0 and self.counted == self.microbatches_expected

    def complain(self, problem: str, rule: str = "") -> None:
        self.problem_count += 1
        if rule:
            self.broken[rule] = self.broken.get(rule, 0) + 1
        if self.problem_count <= MAX_PROBLEMS:
            self.problems.append(problem)


def audit(directory: Path) -> Verdict:
    """Check a run directory: its files, its log and the volunteers' logs in `volunteers/`.

    Raises `LocalError` when the manifest, a file it names or the coordinator's log is damaged; what is wrong with the
    history or with a volunteer's log is a problem in the verdict.
    """
    run = RunDirectory.open(directory)
    run.verify()
    records = list(read_log(run.log_path))
    history = History.of(records)
    said = Testimony.read(run.volunteers, run.run_id)
    verdict = Verdict(
        run=run.run_id,
        steps_planned=run.manifest.training.steps,
        rollbacks=history.rollbacks,
        volunteers=said.volunteers,
        events=said.updates,
    )
    for line in said.unsound:
        verdict.complain(line)
    _check_decisions(records, verdict)
    _check_every_update_was_decided(records, said.applied, verdict)
    _check_steps(run.manifest, history, said.applied, verdict)
    _check_checkpoints(records, said.applied, verdict)
    _check_lives(said.lives, verdict)
    verdict.leftovers = len(_counted_leftovers(history, said))
    return verdict


def _check_decisions(records: Iterable[Record], verdict: Verdict) -> None:
    """F6 and I5: steps are committed one after the other, by the reign in force; only a roll-back goes back, and not anywhere."""
    version = stored = term = view = 0
    for record in records:
        match record["kind"]:
            case "reign":
                if record["term"] <= term:
                    verdict.complain(f"term {record['term']} began after term {term}", "F6")
                term = record["term"]
            case "rollback":
                if record["to_version"] != stored:
                    went = f"the run went back to version {record['to_version']}"
                    verdict.complain(f"{went}, and the last complete checkpoint was {stored}", "I5")
                if record["view"] <= view:
                    verdict.complain(f"view {record['view']} began after view {view}", "F6")
                version, view = record["to_version"], record["view"]
            case "commit":
                if record["step"] != version:
                    verdict.complain(f"step {record['step']} was committed when step {version} was due", "F6")
                if (record["term"], record["view"]) != (term, view):
                    decided = (
                        f"step {record['step']} was decided in term {record['term']}, view {record['view']}"
                    )
                    verdict.complain(f"{decided}, while term {term}, view {view} was in force", "F6")
                version = record["step"] + 1
            case "checkpoint":
                stored = record["version"]


def _check_every_update_was_decided(
    records: Iterable[Record], applied: Mapping[Key, list[Applied]], verdict: Verdict
) -> None:
    """I3: nobody may have applied what was never committed, not even in a history that was rolled back later."""
    decided = {(r["view"], r["step"], r["plan"]) for r in records if r["kind"] == "commit"}
    for view, step, plan, block in applied:
        if (view, step, plan) not in decided:
            problem = f"step {step} block {block}: view {view} plan {plan} was applied and never committed"
            verdict.complain(problem, "I3")


def _check_steps(
    manifest: Manifest, history: History, applied: Mapping[Key, list[Applied]], verdict: Verdict
) -> None:
    """F1 to F3: count the microbatches of every step up to the last one committed."""
    microbatches = range(manifest.training.microbatches)
    verdict.steps = history.version
    verdict.microbatches_expected = verdict.steps * len(microbatches)
    if not verdict.steps:
        verdict.complain("no step was committed")
    for step in range(verdict.steps):
        tallies: list[Counter[int]] = []
        for block in range(len(manifest.blocks)):
            events = _committed_events(history, applied, step, block)
            tallies += [event.tally() for event in events] or [Counter()]
            if not events:
                problem = f"step {step} block {block}: no volunteer says it applied a committed plan"
                verdict.complain(problem, "F3")
            for problem in _disagreements(history, events):
                verdict.complain(f"step {step} block {block}: {problem}", "F2")
        lost = {m for m in microbatches if any(tally[m] == 0 for tally in tallies)}
        duplicated = {m for m in microbatches if any(tally[m] > 1 for tally in tallies)}
        strangers = {m for tally in tallies for m in tally if m not in microbatches}
        verdict.lost += len(lost)
        verdict.duplicated += len(duplicated)
        verdict.counted += len(microbatches) - len(lost | duplicated)
        for what, found in (("lost", lost), ("counted twice", duplicated), ("unknown", strangers)):
            if found:
                names = ", ".join(map(str, sorted(found)))
                verdict.complain(f"step {step}: microbatches {what}: {names}", "F1")


def _committed_events(
    history: History, applied: Mapping[Key, list[Applied]], step: int, block: int
) -> list[Applied]:
    """What the block's holders say about the step as it was committed; nothing if it was not."""
    commit = history.commits.get(step)
    return applied.get((commit["view"], step, commit["plan"], block), []) if commit else []


def _disagreements(history: History, events: Sequence[Applied]) -> Iterator[str]:
    """What is wrong between the holders of one block at one step, and between them and the commit."""
    if not events:
        return
    step, block = events[0].step, events[0].block
    gradients = history.commits[step]["gradients"]
    if any(event.gradient != gradients.get(block, gradients.get(str(block))) for event in events):
        yield "the gradient applied is not the gradient committed"
    if len({event.gradient for event in events}) > 1:
        yield "the holders' gradients differ"
    if len({event.state for event in events}) > 1:
        yield "the holders' states differ"


def _check_checkpoints(
    records: Iterable[Record], applied: Mapping[Key, list[Applied]], verdict: Verdict
) -> None:
    """F4: a checkpoint must hold the very states that holders say came out of the last step before it."""
    states = {(event.step + 1, event.block, event.state) for events in applied.values() for event in events}
    for record in records:
        if record["kind"] == "checkpoint":
            for block, digest in enumerate(record["blocks"]):
                if (record["version"], block, digest) not in states:
                    problem = f"checkpoint {record['version']} block {block}: no holder had that state"
                    verdict.complain(problem, "F4")


def _check_lives(lives: Mapping[str, Sequence[Applied]], verdict: Verdict) -> None:
    """F5: in the order of its log a volunteer's incarnations rise, and within a view it applies each step of a block once."""
    for peer, events in lives.items():
        incarnation = 0
        done: set[tuple[int, int, int]] = set()
        for event in events:
            where = f"{peer}: step {event.step} block {event.block}"
            if event.incarnation < incarnation:
                left = f"incarnation {event.incarnation}, which it had left"
                verdict.complain(f"{where} was applied under {left}", "F5")
            incarnation = max(incarnation, event.incarnation)
            key = (event.view, event.step, event.block)
            if key in done and event.incarnation == incarnation:
                verdict.complain(f"{where} was applied twice in view {event.view}", "F5")
            done.add(key)


def _counted_leftovers(history: History, said: Testimony) -> set[tuple[int, int]]:
    """(step, id) of microbatches that the board showed to a volunteer, and whose gradient is that volunteer's there."""
    return {
        (one.step, microbatch)
        for one in said.found
        for event in _committed_events(history, said.applied, one.step, one.border)[:1]
        if event.view == one.view
        for holder, ids in event.cover
        if holder == one.peer
        for microbatch in set(ids).intersection(one.ids)
    }
