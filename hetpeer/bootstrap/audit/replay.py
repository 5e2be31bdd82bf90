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
from collections.abc import Iterable, Mapping, Sequence
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

    @property
    def problems(self) -> list[str]:
        """A line for each difference, in the order of steps."""
        return list(map(str, sorted(self.differences, key=lambda one: one.step)))

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        return {"ok": self.ok, **asdict(self), "problems": self.problems, "undetected": self.undetected}

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
        segments = _cut(segments, SystemRandom().sample(range(found.steps), sample))
    threads = _threads_of(segments)
    with ThreadPoolExecutor(processes or len(os.sched_getaffinity(0))) as pool:
        for judged in pool.map(lambda one: SegmentReplay(run, one, threads).judge(), segments):
            _add(found, judged)
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


def _cut(segments: Iterable[Segment], drawn: Iterable[int]) -> list[Segment]:
    """The segments with a step of `drawn`, up to the last of these."""
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


def _add(found: Replay, one: Replay) -> None:
    for name in ("equal", "near", "shown", "evaluations"):
        setattr(found, name, getattr(found, name) + getattr(one, name))
    found.farthest, found.bound = max(found.farthest, one.farthest), max(found.bound, one.bound)
    found.here, found.why = one.here or found.here, found.why or one.why
    found.differences += one.differences


class SegmentReplay:
    """The replay of one segment, by one child or two."""

    def __init__(self, run: RunDirectory, segment: Segment, threads: int) -> None:
        self._run = run
        self._segment = segment
        self._threads = threads
        self._lossy = run.manifest.links.lossy
        self._arithmetic = "" if self._lossy else segment.arithmetic
        """Arithmetic with which one machine gets the segment's bits; empty if there is none."""

    def judge(self) -> Replay:
        """Compute and compare. Raises `LocalError` HP-AUDIT-001, HP-DISK-*, HP-CKPT-001."""
        with temporary_folder("replay") as native, temporary_folder("replay") as other:
            head, *results = self._compute(native)
            here = head["arithmetic"]
            if wrong := _wrongly_skipped(results):
                return Replay(steps=len(self._segment.steps), here=here, differences=wrong)
            exact = self._compare_bits(results, here)
            if exact.ok or here == self._arithmetic:
                return exact
            found = Replay(steps=exact.steps, here=here, why=self._why(here))
            if self._lossy:
                self._note(found, compare_numbers(self._segment, results, None))
                found.shown, found.near = found.near, 0
                return found
            _, *others = self._compute(other, reverse=True, environment=OTHER_KERNELS)
            agreement = compare_numbers(self._segment, results, others)
            if agreement.difference is None:
                layouts = self._run.layouts()
                store = CheckpointStore(self._run, layouts)
                agreement.difference = compare_states(self._segment, store, layouts, native, other)
            self._note(found, agreement)
            return found

    def _compute(
        self, folder: Path, *, reverse: bool = False, environment: Mapping[str, str] | None = None
    ) -> list[Result]:
        """Lines of one_machine.py, whose files are in `folder`. Raises `LocalError` HP-AUDIT-001."""
        work, out = folder / "work.json", folder / "out.jsonl"
        how = {"arithmetic": self._arithmetic, "threads": self._threads, "reverse": reverse}
        work.write_text(json.dumps(self._segment.work() | how))
        status, said = run_child(ONE_MACHINE, [str(self._run.path), str(work), str(out)], environment)
        if status:
            raise LocalError(
                "HP-AUDIT-001",
                f"the steps from {self._segment.base['version']} on cannot be computed again here",
                why=(said.strip().splitlines() or ["it was killed, perhaps for its memory"])[-1],
                fix="use a machine with memory for the whole model, its optimizer state and its gradients",
            )
        return [json.loads(line) for line in out.read_text().splitlines()]

    def _compare_bits(self, results: Sequence[Result], here: str) -> Replay:
        """What of `results` is equal to the run, up to the first difference."""
        found = Replay(steps=len(self._segment.steps), here=here)
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

    def _why(self, here: str) -> str:
        if self._lossy:
            return "the run's links round tensors, and one machine has no links"
        if not all(block.ordered for one in self._segment.steps for block in one.blocks):
            return "the logs of an earlier version do not say in which order gradients were added"
        said = {arithmetic for one in self._segment.steps for arithmetic in one.arithmetics}
        if "" in said:
            return "a volunteer's log does not say what decides its last bits"
        return f"volunteers compute on {'; '.join(sorted(said))}, and this machine is {here}"

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
    return None
