"""`hetpeer audit`: was every microbatch counted exactly once? Answered from the volunteers' own signed logs.

For each step that survives in the coordinator's log, each block's holders say which ids were in the gradient they
applied, which gradient it was and which state came out. The audit counts those ids; it does not take the coordinator's
word for them. A history is right when, at every block, each id of the step is there once, all holders tell the same,
and what they applied is what was committed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hetpeer.bootstrap.eventlog import read_event, read_events
from hetpeer.bootstrap.history import History, Record
from hetpeer.bootstrap.log import read_log
from hetpeer.bootstrap.manifest import Digest, Manifest, PeerId
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.settings import Count
from hetpeer.dht.errors import ProtocolError

MAX_PROBLEMS = 100
"""Problems listed one by one; the counts go on."""


Key = tuple[int, int, int, int]
"""View, step, plan and block: what was applied where."""


class Applied(BaseModel):
    """A volunteer's word that it updated a block: with the sum of these slots, and to this state."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["applied"]
    run: str
    peer: PeerId
    incarnation: Count
    term: Count
    view: Count
    step: Count
    block: Count
    plan: Count
    cover: list[tuple[str, list[Count]]]
    """Slots of the reduce plan: holder, slot number, microbatch ids."""
    gradient: Digest
    state: Digest

    @property
    def key(self) -> Key:
        return self.view, self.step, self.plan, self.block

    def tally(self) -> Counter[int]:
        """How often each microbatch is in the gradient that was applied."""
        return Counter(microbatch for _, ids in self.cover for microbatch in ids)


class Found(BaseModel):
    """A volunteer's word that the task board led it to microbatches that `sender` kept, for blocks from `border` on."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["leftover"]
    run: str
    peer: PeerId
    view: Count
    step: Count
    border: Count
    sender: PeerId
    ids: list[Count]


Event = Applied | Found
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
KINDS = frozenset({"applied", "leftover"})


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

    @property
    def ok(self) -> bool:
        return self.problem_count == 0 and self.counted == self.microbatches_expected

    def complain(self, problem: str) -> None:
        self.problem_count += 1
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
    verdict = Verdict(run=run.run_id, steps_planned=run.manifest.training.steps, rollbacks=history.rollbacks)
    applied, found = _read_volunteers(run, verdict)
    _check_decisions(records, verdict)
    _check_every_update_was_decided(records, applied, verdict)
    _check_steps(run.manifest, history, applied, verdict)
    _check_checkpoints(records, applied, verdict)
    verdict.leftovers = len(_counted_leftovers(history, applied, found))
    return verdict


def _read_volunteers(run: RunDirectory, verdict: Verdict) -> tuple[dict[Key, list[Applied]], list[Found]]:
    applied: dict[Key, list[Applied]] = defaultdict(list)
    found: list[Found] = []
    for path in sorted(run.volunteers.glob("*.jsonl")):
        verdict.volunteers += 1
        for number, line in read_events(path):
            try:
                event = _read_event(line, path.stem, run.run_id)
            except (ProtocolError, ValidationError) as error:
                why = error.what if isinstance(error, ProtocolError) else "not a valid event"
                verdict.complain(f"{path.name} line {number}: {why}")
                continue
            if isinstance(event, Applied):
                verdict.events += 1
                applied[event.key].append(event)
            elif event is not None:
                found.append(event)
    return applied, found


def _read_event(line: str, peer: str, run_id: str) -> Event | None:
    """The event of a line, if it is of a kind that is looked at."""
    signer, record = read_event(line)
    if record.get("kind") not in KINDS:
        return None
    event = _EVENT.validate_python(record)
    if not signer == event.peer == peer:
        raise ProtocolError(f"signed by {signer}, in the log of {peer}")
    if event.run != run_id:
        raise ProtocolError(f"of another run, {event.run[:40]}")
    return event


def _check_decisions(records: Iterable[Record], verdict: Verdict) -> None:
    """Steps are committed one after the other; only a rollback goes back."""
    version = 0
    for record in records:
        if record["kind"] == "rollback":
            version = record["to_version"]
        elif record["kind"] == "commit":
            if record["step"] != version:
                verdict.complain(f"step {record['step']} was committed when step {version} was due")
            version = record["step"] + 1


def _check_every_update_was_decided(
    records: Iterable[Record], applied: Mapping[Key, list[Applied]], verdict: Verdict
) -> None:
    """Nobody may have applied what was never committed, not even in a history that was rolled back later."""
    decided = {(r["view"], r["step"], r["plan"]) for r in records if r["kind"] == "commit"}
    for view, step, plan, block in applied:
        if (view, step, plan) not in decided:
            verdict.complain(
                f"step {step} block {block}: view {view} plan {plan} was applied and never committed"
            )


def _check_steps(
    manifest: Manifest, history: History, applied: Mapping[Key, list[Applied]], verdict: Verdict
) -> None:
    """Count the microbatches of every step up to the last one committed."""
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
            for problem in _disagreements(history, events):
                verdict.complain(f"step {step} block {block}: {problem}")
        lost = {m for m in microbatches if any(tally[m] == 0 for tally in tallies)}
        duplicated = {m for m in microbatches if any(tally[m] > 1 for tally in tallies)}
        strangers = {m for tally in tallies for m in tally if m not in microbatches}
        verdict.lost += len(lost)
        verdict.duplicated += len(duplicated)
        verdict.counted += len(microbatches) - len(lost | duplicated)
        for what, found in (("lost", lost), ("counted twice", duplicated), ("unknown", strangers)):
            if found:
                verdict.complain(f"step {step}: microbatches {what}: {', '.join(map(str, sorted(found)))}")


def _committed_events(
    history: History, applied: Mapping[Key, list[Applied]], step: int, block: int
) -> list[Applied]:
    """What the block's holders say about the step as it was committed; nothing if it was not."""
    commit = history.commits.get(step)
    return applied.get((commit["view"], step, commit["plan"], block), []) if commit else []


def _disagreements(history: History, events: Sequence[Applied]) -> Iterator[str]:
    """What is wrong between the holders of one block at one step, and between them and the commit."""
    if not events:
        yield "no volunteer says it applied a committed plan"
        return
    step, block = events[0].step, events[0].block
    gradients = history.commits[step]["gradients"]
    if any(event.gradient != gradients.get(block, gradients.get(str(block))) for event in events):
        yield "the gradient applied is not the gradient committed"
    if len({event.gradient for event in events}) > 1:
        yield "the holders' gradients differ"
    if len({event.state for event in events}) > 1:
        yield "the holders' states differ"


def _counted_leftovers(
    history: History, applied: Mapping[Key, list[Applied]], found: Iterable[Found]
) -> set[tuple[int, int]]:
    """(step, id) of microbatches that the board showed to a volunteer, and whose gradient is that volunteer's there."""
    return {
        (one.step, microbatch)
        for one in found
        for event in _committed_events(history, applied, one.step, one.border)[:1]
        if event.view == one.view
        for holder, ids in event.cover
        if holder == one.peer
        for microbatch in set(ids).intersection(one.ids)
    }


def _check_checkpoints(
    records: Iterable[Record], applied: Mapping[Key, list[Applied]], verdict: Verdict
) -> None:
    """A checkpoint must hold the very states that holders say came out of the last step before it."""
    states = {(event.step + 1, event.block, event.state) for events in applied.values() for event in events}
    for record in records:
        if record["kind"] == "checkpoint":
            for block, digest in enumerate(record["blocks"]):
                if (record["version"], block, digest) not in states:
                    verdict.complain(
                        f"checkpoint {record['version']} block {block}: no holder had that state"
                    )
