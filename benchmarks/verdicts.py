"""Are honest runs called honest? Real swarms with deaths, each computed again by one machine.

Four volunteers in two stages train a net of tanh layers on samples that can only be memorised, at a low or a
high learning rate, so that float rounding grows as it does in any training. Eight faults hit each run: a
volunteer is killed and started again, its worker is killed, or it is frozen for three seconds. Then
`audit --replay` must call the run exact: to the last bit where all volunteers compute alike, within the
measured bounds where one of them has other kernels (`--mixed`). And nobody may be accused: with `--mixed`
every contribution is checked by another volunteer.

    python -m benchmarks.verdicts --runs 20
    python -m benchmarks.verdicts --runs 20 --mixed
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.swarm import Site, Swarm, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.audit.rounding import OTHER_KERNELS
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings, TrustSettings
from hetpeer.peer.daemon.join_run import MAX_RESTARTS
from hetpeer.peer.process.hetpeer_children import end_all
from tests.authors import memorise

VOLUNTEERS, OTHER = 4, 4
FROZEN_S = 3.0
RATES = (5e-4, 5e-3, 5e-2)
WITHIN_S = 600.0
ACCUSATIONS = ("banned", "dispute", "quarrel")
"""Kinds of records that say that a volunteer is wrong, or that one of two is."""


@dataclass(frozen=True, slots=True)
class MixedSite(Site):
    """All on this machine; the volunteer OTHER computes with other kernels."""

    def at(self, node: int) -> Sequence[str]:
        kernels = [f"{name}={value}" for name, value in OTHER_KERNELS.items()] if node == OTHER else []
        return ("env", *kernels, *self.command)


def make_run(folder: Path, steps: int, seed: int, share: float) -> RunDirectory:
    """The run directory; `share` of the contributions are checked."""
    module = memorise.__file__
    training = TrainingSettings(
        steps=steps,
        batch_size=32,
        microbatch_size=4,
        slot_size=4,
        eval_every=20,
        eval_microbatches=2,
        checkpoint_every=10,
        learning_rate=RATES[seed % len(RATES)],
    )
    return create_run(
        folder / "run",
        model=f"{module}:build",
        loss=f"{module}:loss",
        data=[f"{module}:data"],
        name="memorise",
        seed=seed,
        stages=[2],
        training=training,
        trust=TrustSettings(spot_checks=share),
    )


async def hurt(swarm: Swarm, choose: random.Random, steps: int, faults: int) -> list[str]:
    """Faults at equal distances; returns what they were: fewer if the run was over before."""
    done: list[str] = []
    for number in range(1, faults + 1):
        await swarm.until(steps * number // (faults + 1), WITHIN_S)
        if swarm.feed.history.version >= steps:
            return done
        victim, kind = choose.randint(1, VOLUNTEERS), choose.choice(("kill", "kill worker", "freeze"))
        if done.count(f"kill worker {victim}") == MAX_RESTARTS:
            kind = "kill"  # it takes its worker for broken after one more
        if kind == "kill worker" and (worker := swarm.worker(victim)) is not None:
            worker.kill()
        elif kind == "freeze":
            family = swarm.family(victim)
            for process in family:
                process.suspend()
            await asyncio.sleep(FROZEN_S)
            for process in family:
                process.resume()
        else:
            kind = "kill"
            swarm.at_liberty.add(victim)
            await swarm.kill(victim)
            await swarm.start(victim)
        done.append(f"{kind} {victim}")
    return done


async def trial(folder: Path, steps: int, faults: int, seed: int, *, mixed: bool) -> dict[str, Any]:
    """One run: made, trained through its faults, judged."""
    run, began = make_run(folder, steps, seed, 1.0 if mixed else 0.0), time.monotonic()
    site = MixedSite(keep_places=False) if mixed else Site(keep_places=False)
    async with running(run, folder, VOLUNTEERS, site=site) as swarm:
        done = await hurt(swarm, random.Random(seed), steps, faults)
        await swarm.until(steps, WITHIN_S)
        await swarm.bootstrap.finished(WITHIN_S)
        await end_all(list(swarm.volunteers.values()))
    trained = time.monotonic() - began
    verdict = audit(run.path)
    began = time.monotonic()
    replayed = replay(run.path)
    equal = mixed or replayed.equal == verdict.steps
    accusations = [record for record in read_log(run.log_path) if record["kind"] in ACCUSATIONS]
    return {
        "seed": seed,
        "learning_rate": run.manifest.training.learning_rate,
        "faults": done,
        "steps": verdict.steps,
        "rollbacks": verdict.rollbacks,
        "trained_s": round(trained, 1),
        "replayed_s": round(time.monotonic() - began, 1),
        "audit": verdict.ok,
        "problems": verdict.problems[:5],
        "accusations": accusations,
        "replay": replayed.document(),
        "right": verdict.ok and replayed.ok and equal and verdict.steps == steps and not accusations,
    }


def measure(options: Any) -> dict[str, Any]:
    """All trials."""
    trials = []
    for seed in range(options.seed, options.seed + options.runs):
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder)
            made = trial(where, options.steps, options.faults, seed, mixed=options.mixed)
            trials.append(asyncio.run(made))
        if not options.json:
            one = trials[-1]
            print(
                f"seed {seed}: {'right' if one['right'] else 'WRONG'}",
                one["replay"]["problems"][:1],
                flush=True,
            )
    right = sum(one["right"] for one in trials)
    return {"mixed": options.mixed, "trials": trials, "right": right, "met": right == len(trials)}


def show(figures: dict[str, Any]) -> None:
    trials = figures["trials"]
    steps = sum(one["steps"] for one in trials)
    equal = sum(one["replay"]["equal"] for one in trials)
    print(f"{figures['right']} of {len(trials)} honest runs called honest")
    faults = sum(len(one["faults"]) for one in trials)
    print(f"{equal} of {steps} steps equal to the last bit; {faults} faults")
    print(f"{sum(len(one['accusations']) for one in trials)} accusations")


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--mixed", action="store_true", help="one volunteer has other kernels")
    options = parser.parse_args()
    figures = measure(options)
    return report.finish("verdicts-mixed" if options.mixed else "verdicts", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
