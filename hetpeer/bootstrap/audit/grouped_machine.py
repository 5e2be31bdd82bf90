"""Computes a grouped run again: `python -m hetpeer.bootstrap.audit.grouped_machine DIR WORK OUT`.

WORK has the tasks of grouped_script.py as JSON. Each living cluster's state is in memory, as one_machine.py
has that of a whole run. OUT gets JSON lines: {"arithmetic"}; then, with the number of their task as "task",
the results of batches and evaluations as one_machine.py writes them, and {"gradients", "states"} of installed
means. It ends after the first state that is not the run's, or at once on another kind of machine than WORK's
`arithmetic`: its bits could not be the run's.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetpeer.bootstrap.audit.one_machine import CPU, OneMachine, digest_of_sum, stored_states
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import initial_record
from hetpeer.stages.block.arithmetic import arithmetic_of
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.vector_commands import Install
from hetpeer.stages.worker.movement_sums import summed_movements
from hetpeer.stages.worker.vector_sums import added_up

Version = tuple[int, ...]
"""Version of a cluster, by its name in grouped_script.py."""


class GroupedMachine:
    """All clusters of `run`, which have the tasks `tasks`."""

    def __init__(self, run: RunDirectory, tasks: Sequence[Mapping[str, Any]]) -> None:
        self._run = run
        self._specs = [run.block_spec(block) for block in run.manifest.blocks]
        self._clusters: dict[int, OneMachine] = {}
        self._kept: dict[Version, OneMachine] = {}
        """A copy of a checkpoint from which clusters begin, or to which they go back."""
        self._copies: dict[Version, list[Tensor]] = {}
        """Version of a cluster → what it sends, by block, until the last mean of which that is a part: its
        parameters, or its movement.

        A cluster may reach the version of its next copy before a mean of the last one is decided that it
        never installs.
        """
        self._means: dict[int, list[Tensor]] = {}
        """Group → the sum of its copies, by block."""
        begun = (tuple(task["base"]) for task in tasks if task["do"] == "begin" and task["base"])
        self._begin = Counter(begun)
        """Kept checkpoint → how many clusters are still to begin from it."""
        self._add = Counter(
            tuple(copy)
            for task in tasks
            if task["do"] == "average"
            for copy in {tuple(copy) for order in task["orders"] for copy in order}
        )
        """Copy → how many means it is still to be a part of."""
        self._install = Counter(task["group"] for task in tasks if task["do"] == "install")
        """Group → how many clusters are still to install its mean."""

    def carry_out(self, task: Mapping[str, Any]) -> dict[str, Any] | None:
        """Do one task; returns its result, if it has one."""
        match task["do"]:
            case "begin":
                self._begins(task["cluster"], task["base"])
            case "train":
                return self._clusters[task["cluster"]].step(task, task["oldest"], sketched=False)
            case "evaluate":
                work = {"behind": 0, "batch": 0}
                return self._clusters[task["cluster"]].evaluate(task["version"], work, task["skipped"])
            case "copy":
                self._copy(task["cluster"], _version(task))
            case "keep":
                self._kept[_version(task)] = self._like(self._clusters[task["cluster"]])
            case "average":
                self._average(task["group"], task["orders"])
            case "install":
                return self._installs(task)
            case "end":
                self._clusters.pop(task["cluster"], None)
        return None

    def _begins(self, cluster: int, base: Sequence[int] | None) -> None:
        if base is None:
            first = stored_states(self._run, self._specs, initial_record(self._run.manifest))
            self._clusters[cluster] = OneMachine(self._run, self._specs, first)
            return
        kept = tuple(base)
        self._clusters[cluster] = self._like(self._kept[kept])
        self._begin[kept] -= 1
        if not self._begin[kept]:
            del self._kept[kept]

    def _like(self, other: OneMachine) -> OneMachine:
        return OneMachine(self._run, self._specs, other.blocks)

    def _copy(self, cluster: int, version: Version) -> None:
        """Copy what `cluster` sends, to be added up, and its parameters, to be compared with the mean."""
        blocks, sparse = self._clusters[cluster].blocks, self._run.manifest.links.sparse
        for held in blocks:
            held.keep_copy()
        if self._add[version]:
            self._copies[version] = [
                held.movement().whole() if sparse else held.copy.whole() for held in blocks
            ]

    def _average(self, group: int, orders: Sequence[Sequence[Sequence[int]]]) -> None:
        """Add up copies, block by block, in the order that was signed."""
        self._means[group] = []
        for block, order in enumerate(orders):
            parts = [self._copies[tuple(copy)][block] for copy in order]
            add = summed_movements if self._run.manifest.links.sparse else added_up
            self._means[group].append(add(parts))
        for copy in {tuple(copy) for order in orders for copy in order}:
            self._add[copy] -= 1
            if not self._add[copy]:
                del self._copies[copy]

    def _installs(self, task: Mapping[str, Any]) -> dict[str, Any]:
        group, blocks = task["group"], self._clusters[task["cluster"]].blocks
        totals = self._means[group]
        for block, (held, total) in enumerate(zip(blocks, totals, strict=True)):
            how = Install(
                block=block,
                total=Extent(0, 0),
                coefficient=1.0 / task["of"],
                plan=task["plan"],
                needed=task["oldest"],
            )
            held.install(total, how)
            held.drop_copy()
        self._install[group] -= 1
        if not self._install[group]:
            del self._means[group]
        return {
            "gradients": [digest_of_sum(total) for total in totals],
            "states": [held.digest() for held in blocks],
        }


def _version(task: Mapping[str, Any]) -> Version:
    """The version of which a task makes a copy."""
    return task["cluster"], task["life"], task["version"]


def results(run: RunDirectory, tasks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results of the tasks in order, until states are not the run's."""
    machine = GroupedMachine(run, tasks)
    for number, task in enumerate(tasks):
        done = machine.carry_out(task)
        if done is not None:
            yield {"task": number, **done}
            if "states" in done and done["states"] != task["states"]:
                return


def main(directory: Path, work_path: Path, out_path: Path) -> None:
    """Carry out the tasks of `work_path`, and write their results."""
    work = json.loads(work_path.read_text())
    torch.set_num_threads(work["threads"])
    arithmetic = arithmetic_of(CPU)
    with out_path.open("w") as out:
        out.write(json.dumps({"arithmetic": arithmetic}) + "\n")
        if work["arithmetic"] == arithmetic:
            for result in results(RunDirectory.open(directory), work["tasks"]):
                out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
