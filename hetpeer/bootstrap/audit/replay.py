"""`hetpeer audit --replay`: compute the run again on one machine, and compare every number to the last bit.

The logs say in which order gradients were added up. So one machine of the volunteers' kind that adds in that
order gets the run's own bits: each loss, norm, gradient and state, however long the run was and however many
volunteers died. Equality is the verdict; there is no gate. The first step that differs is named, with its
blocks and the volunteers whose gradients are in them.

Where processors differ, or the logs do not say the order, segments between checkpoints are compared with
bounds (rounding.py). It uses the run's graphs, not the author's module: `hetpeer init` compared the two.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import SystemRandom
from typing import Any

from hetpeer.bootstrap.audit.child_process import run_child
from hetpeer.bootstrap.audit.replay_script import Difference, ReplayScript, ReplayStep, Segment
from hetpeer.bootstrap.audit.rounding import (
    OTHER_KERNELS,
    Agreement,
    Result,
    compare_numbers,
    compare_states,
)
from hetpeer.bootstrap.log.evidence import Evidence
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.durable_files import temporary_folder
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore, initial_record
from hetpeer.dht.base.errors import ExitCode, LocalError

ONE_MACHINE = "hetpeer.bootstrap.audit.one_machine"
THREADS = re.compile(r", (\d+) threads?,")
SURE = 0.95
"""Confidence that a sample's result is stated with."""


@dataclass(slots=True)
class Replay:
    """Result of a replay."""

    steps: int
    """Steps of the surviving history whose evidence is there."""
    equal: int = 0
    """Steps that are the run's to the last bit."""
    near: int = 0
    """Steps on another processor, or in another order, that are as near as rounding allows."""
    shown: int = 0
    """Steps that cannot be judged, since the run's links or dtype round more than one machine does."""
    evaluations: int = 0
    """Held-out losses that were compared."""
    farthest: float = 0.0
    """Largest relative difference among the numbers of `near` and `shown` steps."""
    bound: float = 0.0
    """Largest relative difference that was allowed in `near` steps."""
    here: str = ""
    """Arithmetic of this machine."""
    why: str = ""
    """Reason why not all steps could be compared to the last bit."""
    sample: int | None = None
    """Steps that were drawn; None: all steps were compared."""
    differences: list[Difference] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    """Step → loss by this machine."""

    @property
    def problems(self) -> list[str]:
        """A line for each difference, in the order of steps."""
        return list(map(str, sorted(self.differences, key=lambda one: one.step)))

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON; without `losses`, of which there are as many as steps."""
        found = {name: value for name, value in asdict(self).items() if name != "losses"}
        return {"ok": self.ok, **found, "problems": self.problems, "undetected": self.undetected}

    def add(self, part: Replay) -> None:
        """Take in the result of one segment; `steps` stays."""
        self.equal += part.equal
        self.near += part.near
        self.shown += part.shown
        self.evaluations += part.evaluations
        self.farthest, self.bound = max(self.farthest, part.farthest), max(self.bound, part.bound)
        self.here, self.why = part.here or self.here, self.why or part.why
        self.differences += part.differences
        self.losses |= part.losses

    @property
    def undetected(self) -> int:
        """Most wrong steps that the sample may have missed, with the confidence SURE; 0: all were compared.

        Drawn without replacement: the least w with C(steps - w, sample) / C(steps, sample) ≤ 1 - SURE, less
        one.
        """
        if self.sample is None:
            return 0
        missed = (
            wrong
            for wrong in range(1, self.steps + 1)
            if math.comb(self.steps - wrong, self.sample) <= (1 - SURE) * math.comb(self.steps, self.sample)
        )
        return next(missed, 1) - 1


def replay(directory: Path, *, sample: int | None = None, processes: int | None = None) -> Replay:
    """Compute the surviving steps again, segments side by side, and compare.

    `sample`: draw so many steps, and compute only them and those between the last checkpoint and them.
    `processes`: children at a time; None: one for each processor core. Raises `LocalError` HP-AUDIT-001 if a
    child fails, HP-AUDIT-002 for a grouped run, HP-DISK-*.

        assert replay(Path("run")).ok
    """
    run = RunDirectory.open(directory)
    _refuse_grouped(run)
    records = list(read_log(run.log_path))
    script = ReplayScript.of(records, Evidence.read(run.volunteers, run.run_id), len(run.manifest.blocks))
    segments = script.segments(_kept_checkpoints(run, records))
    found = Replay(steps=len(script.steps))
    if sample is not None and sample < found.steps:
        found.sample = sample
        segments = _with_steps(segments, SystemRandom().sample(range(found.steps), sample))
    threads = _threads_of(segments)
    count = processes or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(count) as pool:
        for judged in pool.map(lambda some: judge(run, some, threads), _shares(segments, count)):
            for one in judged:
                found.add(one)
    return found


def _refuse_grouped(run: RunDirectory) -> None:
    if run.manifest.averaging is not None:
        raise LocalError(
            "HP-AUDIT-002",
            "a grouped run cannot be trained again on one machine",
            why="which clusters were ready together is part of what came out",
            fix="leave out --replay: the audit itself needs the logs alone",
            exit_code=ExitCode.CONFIG,
        )


def _kept_checkpoints(run: RunDirectory, records: Sequence[Record]) -> list[Record]:
    """Records of the checkpoints whose files are here, the initial state included."""
    store = CheckpointStore(run, run.layouts())
    sealed = [record for record in records if record["kind"] == "checkpoint"]
    return [initial_record(run.manifest), *(record for record in sealed if store.has(record))]


def _with_steps(segments: Iterable[Segment], drawn: Iterable[int]) -> list[Segment]:
    """Segments that have steps of `drawn`, each cut behind its last one."""
    found, wanted = [], set(drawn)
    for segment in segments:
        last = max((one.step for one in segment.steps if one.step in wanted), default=None)
        if last is None:
            continue
        steps = [one for one in segment.steps if one.step <= last]
        evaluations = {version: loss for version, loss in segment.evaluations.items() if version <= last}
        whole = len(steps) == len(segment.steps)
        found.append(segment if whole else replace(segment, steps=steps, evaluations=evaluations, end=None))
    return found


def _threads_of(segments: Iterable[Segment]) -> int:
    """Threads of the volunteers' workers, if all have as many; 1 otherwise."""
    said = {arithmetic for segment in segments for one in segment.steps for arithmetic in one.arithmetics}
    found = {int(number) for arithmetic in said for number in THREADS.findall(arithmetic)}
    return found.pop() if len(found) == 1 else 1


def _shares(segments: Sequence[Segment], count: int) -> list[list[Segment]]:
    """The segments in at most `count` shares with about as many steps each."""
    shares: list[list[Segment]] = [[] for _ in range(count)]
    for segment in sorted(segments, key=lambda one: -len(one.steps)):
        min(shares, key=lambda share: sum(len(one.steps) for one in share)).append(segment)
    return [share for share in shares if share]


def judge(run: RunDirectory, segments: Sequence[Segment], threads: int) -> list[Replay]:
    """Compute segments in a child process, and those that need bounds in a second one; compare with the run.

    Raises `LocalError` HP-AUDIT-001, HP-DISK-*, HP-CKPT-001.
    """
    with temporary_folder("replay") as native, temporary_folder("replay") as other:
        here, results = _compute(run, segments, threads, native)
        judges = [SegmentReplay(run, one, here) for one in segments]
        exact = [one.by_bits(own) for one, own in zip(judges, results, strict=True)]
        near = [number for number, one in enumerate(exact) if one is None]
        found = {number: one for number, one in enumerate(exact) if one is not None}
        rounded: list[list[Result]] = [[] for _ in near]
        if near and not run.manifest.links.lossy:
            again = [segments[number] for number in near]
            _, rounded = _compute(run, again, threads, other, rounds_once=True)
        for turn, number in enumerate(near):
            folders = native / str(number), other / str(turn)
            found[number] = judges[number].by_bounds(results[number], rounded[turn], *folders)
        for number, one in found.items():
            one.losses = {result["step"]: result["loss"] for result in results[number] if "step" in result}
        return list(found.values())


def _compute(
    run: RunDirectory,
    segments: Sequence[Segment],
    threads: int,
    folder: Path,
    *,
    rounds_once: bool = False,
) -> tuple[str, list[list[Result]]]:
    """Arithmetic of one_machine.py, and its results for each segment; its files are in `folder`.

    `rounds_once`: as another processor might compute them.
    """
    work, out = folder / "work.json", folder / "out.jsonl"
    asked = [one.work() | {"arithmetic": _due_arithmetic(run, one)} for one in segments]
    work.write_text(json.dumps({"segments": asked, "threads": threads, "rounds_once": rounds_once}))
    environment = OTHER_KERNELS if rounds_once else None
    status, said = run_child(ONE_MACHINE, [str(run.path), str(work), str(out)], environment)
    if status:
        raise LocalError(
            "HP-AUDIT-001",
            "the steps of the run cannot be computed again here",
            why=(said.strip().splitlines() or ["it was killed, perhaps for its memory"])[-1],
            fix="use a machine with memory for the whole model, its optimizer state and its gradients",
        )
    head, *lines = (json.loads(line) for line in out.read_text().splitlines())
    results: list[list[Result]] = [[] for _ in segments]
    for line in lines:
        results[line["segment"]].append(line)
    return head["arithmetic"], results


def _due_arithmetic(run: RunDirectory, segment: Segment) -> str:
    """Arithmetic of a machine that must get the segment's bits; empty if no machine must."""
    return "" if run.manifest.links.lossy else segment.arithmetic


class SegmentReplay:
    """The comparison of one segment with what this machine, of the arithmetic `here`, has computed."""

    def __init__(self, run: RunDirectory, segment: Segment, here: str) -> None:
        self._run = run
        self._segment = segment
        self._here = here

    def by_bits(self, results: Sequence[Result]) -> Replay | None:
        """The verdict if it is equality; None if bits differ and need not be equal here."""
        if wrong := _wrongly_skipped(results):
            return Replay(steps=len(self._segment.steps), here=self._here, differences=wrong)
        exact = self._compare_bits(results)
        return exact if exact.ok or self._here == _due_arithmetic(self._run, self._segment) else None

    def by_bounds(
        self, results: Sequence[Result], others: Sequence[Result], native: Path, other: Path
    ) -> Replay:
        """The verdict by bounds; for a lossy run, which has no `others`, the differences alone.

        `native`, `other`: folders with the states at the segment's end.
        """
        found = Replay(steps=len(self._segment.steps), here=self._here, why=self._why())
        if self._run.manifest.links.lossy:
            self._note(found, compare_numbers(self._segment, results, None))
            found.shown, found.near = found.near, 0
            return found
        agreement = compare_numbers(self._segment, results, others)
        if agreement.difference is None:
            layouts = self._run.layouts()
            store = CheckpointStore(self._run, layouts)
            agreement.difference = compare_states(self._segment, store, layouts, native, other)
        self._note(found, agreement)
        return found

    def _compare_bits(self, results: Sequence[Result]) -> Replay:
        """Count the `results` that equal the run's, up to the first difference."""
        found = Replay(steps=len(self._segment.steps), here=self._here)
        steps = {one.step: one for one in self._segment.steps}
        for one in results:
            if "evaluation" in one:
                version = one["evaluation"]
                if one["loss"] != self._segment.evaluations[version]:
                    found.differences.append(Difference(step=version, what="held-out loss"))
                    return found
                found.evaluations += 1
            elif difference := _difference(steps[one["step"]], one):
                found.differences.append(difference)
                return found
            else:
                found.equal += 1
        return found

    def _why(self) -> str:
        if self._run.manifest.links.lossy:
            return "the run's links round tensors, and one machine has no links"
        if not all(block.ordered for one in self._segment.steps for block in one.blocks):
            return "the logs of an earlier version do not say in which order gradients were added"
        said = {arithmetic for one in self._segment.steps for arithmetic in one.arithmetics}
        if "" in said:
            return "a volunteer's log does not say what decides its last bits"
        return f"volunteers compute on {'; '.join(sorted(said))}, and this machine is {self._here}"

    @staticmethod
    def _note(found: Replay, agreement: Agreement) -> None:
        found.near, found.evaluations = agreement.steps, agreement.evaluations
        found.farthest, found.bound = agreement.farthest, agreement.bound
        if agreement.difference is not None:
            found.differences.append(agreement.difference)


def _wrongly_skipped(results: Iterable[Result]) -> list[Difference]:
    """Microbatches that the run skipped although one machine can compute them."""
    return [
        Difference(step=one["step"], what=f"failure of microbatch {microbatch}")
        for one in results
        for microbatch in one.get("computable", ())
    ]


def _difference(step: ReplayStep, computed: Result) -> Difference | None:
    """The most telling number of `step` that `computed` does not have; None if all are equal."""
    for what in ("gradient", "state"):
        blocks = tuple(
            block
            for block, (ours, theirs) in enumerate(zip(step.blocks, computed[f"{what}s"], strict=True))
            if getattr(ours, what) != theirs
        )
        if blocks:
            holders = sorted({peer for block in blocks for peer in step.blocks[block].holders})
            return Difference(step=step.step, what=what, blocks=blocks, holders=tuple(holders))
    for what in ("loss", "norm", "coefficient"):
        if getattr(step, what) != computed[what]:
            return Difference(step=step.step, what=what)
    told = zip(step.squares, computed["squares"], strict=False)
    wrong = tuple(block for block, (ours, theirs) in enumerate(told) if ours != theirs)
    return Difference(step=step.step, what="norm", blocks=wrong) if wrong else None
