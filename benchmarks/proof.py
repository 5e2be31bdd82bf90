"""A long run with deaths in it: does anything grow, and is every microbatch still counted exactly once?

A small swarm of two clusters with two stages trains for `--steps` steps. Now and then one of two volunteers
is killed (SIGKILL) and started again; the other two and the bootstrap node live through it all. Every few
seconds memory and descriptors of every process are read, and what a volunteer holds inside
(benchmarks/observed.py). At the end: growth of everything that lived long, audit, replay on one machine.

    make proof
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.lives import Life, Watch, slope
from benchmarks.swarm import Model, Site, Swarm, make_run, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.peer.process.hetpeer_children import COMMAND

SAMPLE_S = 2.0
STALL_S = 120.0
END_S = 60.0
SURVIVORS, VICTIMS = (1, 2), (3, 4)
OBSERVED = (*COMMAND[:-1], "benchmarks.observed")
WARM_UP, WARM_UP_STEPS = 0.3, 100
"""This part of a process' life and so many of its steps do not count: caches fill, the allocator settles."""
MIN_SAMPLES = 8
GROWTH_MIB = 16.0
"""Allowed growth of a process' memory by the fitted line over 1,000 steps.

The coordinator keeps its history: 1 MiB.
"""
GROWTH_FILES = 4
GROWTH_FRAMES = 100


def growth(life: Life) -> dict[str, Any] | None:
    """Changes after the warm-up; None for a life too short to tell."""
    warm = next((i for i, step in enumerate(life.steps) if step >= life.steps[0] + WARM_UP_STEPS), None)
    if warm is None:
        return None
    first = max(warm, int(len(life.steps) * WARM_UP))
    steps, rss = life.steps[first:], life.rss_mib[first:]
    if len(steps) < MIN_SAMPLES or steps[-1] == steps[0]:
        return None
    rise, late = slope(steps, rss), slope(steps[len(steps) // 2 :], rss[len(rss) // 2 :])
    files, threads = _rise(life.files[first:]), _rise(life.threads[first:])
    return {
        "kind": life.kind,
        "steps": steps[-1] - steps[0],
        "rss_mib": round(rss[-1], 1),
        "mib_per_1000_steps": round(1000 * rise, 2),
        "mib_per_1000_steps_in_the_later_half": round(1000 * late, 2),
        "fitted_mib": round(rise * (steps[-1] - steps[0]), 2),
        "files": files,
        "threads": threads,
        "grows": rise * (steps[-1] - steps[0]) > GROWTH_MIB or files > GROWTH_FILES,
    }


def _rise(values: Sequence[float]) -> float:
    """Last third's median above the first third's."""
    third = max(1, len(values) // 3)
    return statistics.median(values[-third:]) - statistics.median(values[:third])


async def train(options: Any, folder: Path) -> dict[str, Any]:
    training = TrainingSettings(
        steps=options.steps,
        batch_size=8,
        microbatch_size=2,
        slot_size=2,
        eval_every=max(1, options.steps // 20),
        eval_microbatches=2,
        checkpoint_every=max(1, options.steps // 20),
    )
    model = Model(width=32, heads=2, sequence_length=32)
    run = make_run(folder, model, 2, training, options.seed)
    began = time.monotonic()
    async with running(run, folder, len(SURVIVORS + VICTIMS), site=Site(OBSERVED)) as swarm:
        watch = Watch(swarm)
        kills = await _see_through(options, swarm, watch)
        await swarm.finished(SURVIVORS, END_S)
        lives = [grown for life in watch.lives.values() if (grown := growth(life))]
        inside = {f"volunteer {n}": _inside(swarm.home(n) / "inside.jsonl") for n in SURVIVORS}
    seconds = time.monotonic() - began
    verdict = audit(run.path)
    replayed = replay(run.path)
    steady = not any(one["grows"] for one in lives) and not any(one["grows"] for one in inside.values())
    return {
        "steps": verdict.steps,
        "kills": kills,
        "rollbacks": verdict.rollbacks,
        "seconds": round(seconds, 1),
        "processes": lives,
        "inside": inside,
        "audit": {"ok": verdict.ok, **asdict(verdict)},
        "replay": replayed.document(),
        "met": steady and verdict.ok and replayed.ok and replayed.equal == verdict.steps == options.steps,
    }


async def _see_through(options: Any, swarm: Swarm, watch: Watch) -> list[dict[str, int]]:
    """Until all steps are committed: samples, and deaths at equal distances of those whom the seed names."""
    choose = random.Random(options.seed)
    due = [options.steps * number // (options.kills + 1) for number in range(1, options.kills + 1)]
    kills: list[dict[str, int]] = []
    at, version = time.monotonic(), 0
    while version < options.steps:
        await asyncio.sleep(SAMPLE_S)
        swarm.feed.poll()
        swarm.check()
        watch.sample()
        if swarm.feed.history.version != version:
            at, version = time.monotonic(), swarm.feed.history.version
        elif time.monotonic() - at > STALL_S:
            raise SystemExit(f"no step was committed for {STALL_S:.0f} s after step {version}")
        if due and version >= due[0]:
            due.pop(0)
            number = choose.choice(VICTIMS)
            await swarm.volunteers[number].kill()
            await swarm.add(number)
            kills.append({"step": version, "volunteer": number})
    return kills


def _inside(path: Path) -> dict[str, Any]:
    """How what a volunteer holds changed over its life."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = lines[int(len(lines) * WARM_UP) :]
    rises = {name: _rise([line[name] for line in lines]) for name in lines[0] if name != "time"}
    highest = {name: max(line[name] for line in lines) for name in ("outbox", "arena_used", "tasks")}
    return {
        "samples": len(lines),
        "rises": rises,
        "highest": highest,
        "grows": highest["outbox"] > GROWTH_FRAMES or rises["tasks"] > GROWTH_FRAMES,
    }


def show(figures: dict[str, Any]) -> None:
    kills, verdict, replayed = figures["kills"], figures["audit"], figures["replay"]
    print(
        f"{figures['steps']} steps in {figures['seconds']} s, {len(kills)} kills, {figures['rollbacks']} "
        "rollbacks"
    )
    for one in figures["processes"]:
        print(
            f"  {one['kind']:15} {one['steps']:5} steps, {one['rss_mib']:6.1f} MiB, fitted "
            f"{one['fitted_mib']:+.2f} MiB"
            f" ({one['mib_per_1000_steps']:+.2f} per 1000 steps, later half "
            f"{one['mib_per_1000_steps_in_the_later_half']:+.2f}), files {one['files']:+g}, threads "
            f"{one['threads']:+g}" + ("  GROWS" if one["grows"] else "")
        )
    for name, one in figures["inside"].items():
        rises = ", ".join(f"{what} {rise:+g}" for what, rise in one["rises"].items())
        print(f"  {name}: {rises}; at most {one['highest']}" + ("  GROWS" if one["grows"] else ""))
    print(
        f"  microbatches: {verdict['counted']} of {verdict['microbatches_expected']} counted exactly once,"
        f" {verdict['lost']} lost, {verdict['duplicated']} duplicated"
    )
    print(f"  replay: {replayed['equal']} of {replayed['steps']} steps equal to the last bit")
    for problem in (*verdict["problems"], *replayed["problems"]):
        print(f"  problem: {problem}")
    print(f"  {'proved' if figures['met'] else 'NOT proved'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=1200.0, help="give up after so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-proof-") as folder:
        figures = asyncio.run(asyncio.wait_for(train(options, Path(folder)), options.limit_s))
    return report.finish(f"proof-{options.steps}", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
