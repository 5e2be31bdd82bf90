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


class GroupedMachine:
    """All clusters of `run`, which have the tasks `tasks`."""

    def __init__(self, run: RunDirectory, tasks: Sequence[Mapping[str, Any]]) -> None:
        self._run = run
        self._specs = [run.block_spec(block) for block in run.manifest.blocks]
        self._clusters: dict[int, OneMachine] = {}
        self._kept: dict[tuple[int, int], OneMachine] = {}
        """(cluster, version) → a copy of it: a checkpoint from which others begin."""
        self._means: dict[int, list[Tensor]] = {}
        """Group → the sum of its copies, by block."""
        begun = (tuple(task["base"]) for task in tasks if task["do"] == "begin" and task["base"])
        self._begin = Counter(begun)
        """Kept checkpoint → how many clusters are still to begin from it."""
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
                for held in self._clusters[task["cluster"]].blocks:
                    held.keep_copy()
            case "keep":
                self._kept[task["cluster"], task["version"]] = self._like(self._clusters[task["cluster"]])
            case "average":
                self._means[task["group"]] = [
                    self._sum(block, order) for block, order in enumerate(task["orders"])
                ]
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
        number, version = base
        self._clusters[cluster] = self._like(self._kept[number, version])
        self._begin[number, version] -= 1
        if not self._begin[number, version]:
            del self._kept[number, version]

    def _like(self, other: OneMachine) -> OneMachine:
        return OneMachine(self._run, self._specs, other.blocks)

    def _sum(self, block: int, order: Sequence[int]) -> Tensor:
        """The sum of the copies of these clusters, added one by one in this order."""
        first, *others = (self._clusters[cluster].blocks[block].copy.whole() for cluster in order)
        total = first.clone()
        for other in others:
            total.add_(other)
        return total

    def _installs(self, task: Mapping[str, Any]) -> dict[str, Any]:
        group, blocks = task["group"], self._clusters[task["cluster"]].blocks
        totals = self._means[group]
        for held, total in zip(blocks, totals, strict=True):
            held.install(total, 1.0 / task["of"], task["plan"])
            held.drop_copy()
        self._install[group] -= 1
        if not self._install[group]:
            del self._means[group]
        return {
            "gradients": [digest_of_sum(total) for total in totals],
            "states": [held.digest() for held in blocks],
        }


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
