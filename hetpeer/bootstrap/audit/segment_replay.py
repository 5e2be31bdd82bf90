"""Segments of a run, computed again in child processes and compared: by bits, or by bounds (rounding.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetpeer.bootstrap.audit.child_process import run_child
from hetpeer.bootstrap.audit.replay_result import Replay
from hetpeer.bootstrap.audit.replay_script import BlockSum, Difference, ReplayStep, Segment
from hetpeer.bootstrap.audit.rounding import (
    NOISE_ROOM,
    OTHER_KERNELS,
    Agreement,
    Computation,
    Result,
    compare_numbers,
    compare_states,
)
from hetpeer.bootstrap.run.durable_files import temporary_folder
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore
from hetpeer.dht.base.errors import LocalError

ONE_MACHINE = "hetpeer.bootstrap.audit.one_machine"
NOISES = 4
"""Computations with noise of a segment that is farther away than rounding once explains."""


def judge(run: RunDirectory, segments: Sequence[Segment], threads: int) -> list[Replay]:
    """Compute segments in a child process, and those that need bounds in others; compare with the run.

    Raises `LocalError` HP-AUDIT-001, HP-DISK-*, HP-CKPT-001.
    """
    with temporary_folder("replay") as folder:
        machine = SegmentMachine(run, threads, folder)
        own = machine.compute(segments)
        judges = [SegmentReplay(run, one, machine.arithmetic) for one in segments]
        exact = [one.by_bits(computed.results) for one, computed in zip(judges, own, strict=True)]
        found = {number: one for number, one in enumerate(exact) if one is not None}
        near = [number for number in range(len(segments)) if number not in found]
        others: dict[int, list[Computation]] = {number: [] for number in near}

        def compare(numbers: Sequence[int]) -> None:
            for number in numbers:
                found[number] = judges[number].by_bounds(own[number], others[number])

        def compute(numbers: Sequence[int], noise: int | None) -> None:
            again = machine.compute([segments[number] for number in numbers], noise=noise, otherwise=True)
            for number, computed in zip(numbers, again, strict=True):
                others[number].append(computed)

        if near and not run.manifest.links.lossy:
            compute(near, None)
        compare(near)
        if far := [number for number in near if not found[number].ok]:
            for noise in range(NOISES):
                compute(far, noise)
            compare(far)
        for number, one in found.items():
            results = own[number].results
            one.losses = {result["step"]: result["loss"] for result in results if "step" in result}
        return list(found.values())


def child_failed(said: str) -> LocalError:
    """The error HP-AUDIT-001 for a child that failed with `said` on its stderr."""
    return LocalError(
        "HP-AUDIT-001",
        "the steps of the run cannot be computed again here",
        why=(said.strip().splitlines() or ["it was killed, perhaps for its memory"])[-1],
        fix="use a machine with memory for the whole model, its optimizer state and its gradients",
    )


class SegmentMachine:
    """Computes segments of `run` in child processes of `threads` threads; their files are in `folder`."""

    def __init__(self, run: RunDirectory, threads: int, folder: Path) -> None:
        self._run = run
        self._threads = threads
        self._folder = folder
        self.arithmetic = ""
        """Arithmetic of this machine, as the last child has said it."""

    def compute(
        self, segments: Sequence[Segment], *, otherwise: bool = False, noise: int | None = None
    ) -> list[Computation]:
        """Compute `segments`; `otherwise`: as another processor might: rounding once, or with that `noise`.

        Raises `LocalError` HP-AUDIT-001.
        """
        rounds_once = otherwise and noise is None
        folder = self._folder / f"{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        work, out = folder / "work.json", folder / "out.jsonl"
        due = ["" if otherwise else _due_arithmetic(self._run, one) for one in segments]
        asked = [one.work() | {"arithmetic": said} for one, said in zip(segments, due, strict=True)]
        how = {"threads": self._threads, "rounds_once": rounds_once, "noise": noise}
        work.write_text(json.dumps({"segments": asked, **how}))
        environment = OTHER_KERNELS if rounds_once else None
        status, said = run_child(ONE_MACHINE, [str(self._run.path), str(work), str(out)], environment)
        if status:
            raise child_failed(said)
        head, *lines = (json.loads(line) for line in out.read_text().splitlines())
        results: list[list[Result]] = [[] for _ in segments]
        for line in lines:
            results[line["segment"]].append(line)
        self.arithmetic = self.arithmetic or head["arithmetic"]
        room = {} if noise is None else {"room": NOISE_ROOM}
        return [Computation(each, folder / str(number), **room) for number, each in enumerate(results)]


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

    def by_bounds(self, own: Computation, others: Sequence[Computation]) -> Replay:
        """The verdict by bounds; for a lossy run, which has no `others`, the differences alone."""
        found = Replay(steps=len(self._segment.steps), here=self._here, why=self._why())
        if self._run.manifest.links.lossy:
            self._note(found, compare_numbers(self._segment, own, []))
            found.shown, found.near = found.near, 0
            return found
        agreement = compare_numbers(self._segment, own, others)
        if agreement.difference is None:
            layouts = self._run.layouts()
            store = CheckpointStore(self._run, layouts)
            agreement.difference = compare_states(self._segment, store, layouts, own, others)
        self._note(found, agreement)
        return found

    def _compare_bits(self, results: Sequence[Result]) -> Replay:
        """Count the `results` that equal the run's, up to the first difference."""
        found = Replay(steps=len(self._segment.steps), here=self._here)
        steps = {one.step: one for one in self._segment.steps}
        for one in results:
            if "evaluation" in one:
                version = one["evaluation"]
                hits = self._segment.hits.get(version)
                wrong = one["loss"] != self._segment.evaluations[version]
                if wrong or (hits is not None and [*hits] != one["hits"]):
                    what = "held-out loss" if wrong else "held-out accuracy"
                    found.differences.append(Difference(step=version, what=what))
                    return found
                found.evaluations += 1
            elif difference := step_difference(steps[one["step"]], one):
                found.differences.append(difference)
                return found
            else:
                found.equal += 1
        return found

    def _why(self) -> str:
        if self._run.manifest.links.lossy:
            return "links round, and logs do not say all of it: residuals, or what was computed twice"
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


def step_difference(step: ReplayStep, computed: Result, cluster: int = 0) -> Difference | None:
    """The most telling number of `step` that `computed` does not have; None if all are equal."""
    if found := differing_blocks(step.step, step.blocks, computed, cluster):
        return found
    for what in ("loss", "norm", "coefficient"):
        if getattr(step, what) != computed[what]:
            return Difference(step=step.step, what=what, cluster=cluster)
    told = zip(step.squares, computed["squares"], strict=False)
    wrong = tuple(block for block, (ours, theirs) in enumerate(told) if ours != theirs)
    return Difference(step=step.step, what="norm", blocks=wrong, cluster=cluster) if wrong else None


def differing_blocks(
    step: int, sums: Sequence[BlockSum], computed: Result, cluster: int = 0
) -> Difference | None:
    """The blocks whose sums, or else whose states, `computed` does not have; None if all are equal."""
    for what in ("gradient", "state"):
        blocks = tuple(
            block
            for block, (ours, theirs) in enumerate(zip(sums, computed[f"{what}s"], strict=True))
            if getattr(ours, what) != theirs
        )
        if blocks:
            holders = sorted({peer for block in blocks for peer in sums[block].holders})
            return Difference(step=step, what=what, blocks=blocks, holders=tuple(holders), cluster=cluster)
    return None
