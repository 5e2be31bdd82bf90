"""The replay of a grouped run: all its clusters on one machine, compared with the logs to the last bit.

Where processors differ there is no verdict: bounds need the run's own states every few steps, and only one
cluster's state is in a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hetpeer.bootstrap.audit.child_process import run_child
from hetpeer.bootstrap.audit.grouped_script import GroupedScript, Installed
from hetpeer.bootstrap.audit.replay_result import Replay
from hetpeer.bootstrap.audit.replay_script import Difference, ReplayStep
from hetpeer.bootstrap.audit.segment_replay import child_failed, differing_blocks, step_difference
from hetpeer.bootstrap.log.evidence import Evidence
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.run.durable_files import temporary_folder
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError

GROUPED_MACHINE = "hetpeer.bootstrap.audit.grouped_machine"


def replay_grouped(
    run: RunDirectory,
    records: Sequence[Record],
    evidence: Evidence,
    threads: Callable[[Collection[str]], int],
) -> Replay:
    """Compute the clusters of `run` again and compare.

    `threads`: number of the volunteers' threads, from their arithmetics. Raises `LocalError` HP-AUDIT-001,
    HP-AUDIT-002, HP-DISK-*.
    """
    averaging = run.manifest.averaging
    if run.manifest.links.lossy:
        raise _refusal("its links round tensors, and one machine has no links")
    if averaging is not None and averaging.robust:
        raise _refusal("which numbers are clipped depends on who added up which part")
    script = GroupedScript.of(records, evidence, len(run.manifest.blocks))
    said = frozenset[str]().union(*(one.arithmetics for one in script.trained))
    if not all(block.ordered for one in script.trained for block in one.blocks):
        raise _refusal("a volunteer's log does not say in which order gradients were added")
    if not script.steps:
        return Replay(steps=0)
    if len(said) != 1 or "" in said:
        raise _refusal(f"volunteers compute on {'; '.join(sorted(said))}, and bits differ between them")
    [arithmetic] = said
    here, results = _computed(run, script, arithmetic, threads(said))
    if here != arithmetic:
        raise _refusal(f"volunteers compute on {arithmetic}, and this machine is {here}")
    return _compared(script, results, here)


def _refusal(why: str) -> LocalError:
    return LocalError(
        "HP-AUDIT-002",
        "this grouped run cannot be trained again here to the last bit",
        why=why,
        fix="leave out --replay: the audit itself needs the logs alone",
        exit_code=ExitCode.CONFIG,
    )


def _computed(
    run: RunDirectory, script: GroupedScript, arithmetic: str, threads: int
) -> tuple[str, list[Mapping[str, Any]]]:
    """Arithmetic of this machine, and its results; none if the arithmetic is another one."""
    with temporary_folder("replay") as folder:
        work, out = folder / "work.json", folder / "out.jsonl"
        asked = {"tasks": script.tasks, "arithmetic": arithmetic, "threads": threads}
        work.write_text(json.dumps(asked))
        status, said = run_child(GROUPED_MACHINE, [str(run.path), str(work), str(out)])
        if status:
            raise child_failed(said)
        head, *lines = (json.loads(line) for line in out.read_text().splitlines())
    return head["arithmetic"], lines


def _compared(script: GroupedScript, results: Sequence[Mapping[str, Any]], here: str) -> Replay:
    """Count the results that equal the run's, up to the first difference."""
    found = Replay(steps=script.steps, here=here)
    for one in results:
        cluster, due = script.expected[one["task"]]
        difference = _difference(cluster, due, one)
        if difference is not None:
            found.differences.append(difference)
            break
        if isinstance(due, ReplayStep | Installed):
            found.equal += 1
        else:
            found.evaluations += 1
    return found


def _difference(
    cluster: int, due: ReplayStep | Installed | Record, computed: Mapping[str, Any]
) -> Difference | None:
    if isinstance(due, ReplayStep):
        for microbatch in computed["computable"]:
            return Difference(cluster=cluster, step=due.step, what=f"failure of microbatch {microbatch}")
        return step_difference(due, computed, cluster)
    if isinstance(due, Installed):
        return differing_blocks(due.step, due.blocks, computed, cluster)
    if due["loss"] != computed["loss"] or due.get("hits", computed["hits"]) != computed["hits"]:
        wrong = "held-out loss" if due["loss"] != computed["loss"] else "held-out accuracy"
        return Difference(cluster=cluster, step=due["step"], what=wrong)
    return None
