"""`hetpeer audit --replay`: compute the run again on one machine, and compare every number to the last bit.

The logs say in which order gradients were added up. So one machine of the volunteers' kind that adds in that
order gets the run's own bits: each loss, norm, gradient and state, however long the run was and however many
volunteers died. Equality is the verdict; there is no gate. The first step that differs is named, with its
blocks and the volunteers whose gradients are in them.

Where processors differ, or the logs do not say the order, segments between checkpoints are compared with
bounds (rounding.py). It uses the run's graphs, not the author's module: `hetpeer init` compared the two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import SystemRandom

from hetpeer.bootstrap.audit.grouped_replay import replay_grouped
from hetpeer.bootstrap.audit.replay_result import Replay
from hetpeer.bootstrap.audit.replay_script import ReplayScript, Segment
from hetpeer.bootstrap.audit.segment_replay import judge
from hetpeer.bootstrap.log.evidence import Evidence
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore, initial_record

THREADS = re.compile(r", (\d+) threads?,")


def replay(directory: Path, *, sample: int | None = None, processes: int | None = None) -> Replay:
    """Compute the surviving steps again, segments side by side, and compare.

    `sample`: draw so many steps, and compute only them and those between the last checkpoint and them; of a
    grouped run all are computed, in one child. `processes`: children at a time; None: one for each processor
    core. Raises `LocalError` HP-AUDIT-001 if a child fails, HP-AUDIT-002 for a grouped run whose bits this
    machine cannot get, HP-DISK-*.

        assert replay(Path("run")).ok
    """
    run = RunDirectory.open(directory)
    records, evidence = list(read_log(run.log_path)), Evidence.read(run.volunteers, run.run_id)
    if run.manifest.averaging is not None:
        return replay_grouped(run, records, evidence, _threads_of)
    script = ReplayScript.of(records, evidence, len(run.manifest.blocks))
    segments = script.segments(_kept_checkpoints(run, records))
    found = Replay(steps=len(script.steps))
    if sample is not None and sample < found.steps:
        found.sample = sample
        segments = _with_steps(segments, SystemRandom().sample(range(found.steps), sample))
    threads = _threads_of({said for some in segments for one in some.steps for said in one.arithmetics})
    count = processes or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(count) as pool:
        for judged in pool.map(lambda some: judge(run, some, threads), _shares(segments, count)):
            for one in judged:
                found.add(one)
    return found


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


def _threads_of(arithmetics: Iterable[str]) -> int:
    """Threads of the volunteers' workers, if all have as many; 1 otherwise."""
    found = {int(number) for arithmetic in arithmetics for number in THREADS.findall(arithmetic)}
    return found.pop() if len(found) == 1 else 1


def _shares(segments: Sequence[Segment], count: int) -> list[list[Segment]]:
    """The segments in at most `count` shares with about as many steps each."""
    shares: list[list[Segment]] = [[] for _ in range(count)]
    for segment in sorted(segments, key=lambda one: -len(one.steps)):
        min(shares, key=lambda share: sum(len(one.steps) for one in share)).append(segment)
    return [share for share in shares if share]
