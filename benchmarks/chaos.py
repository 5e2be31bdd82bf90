"""A swarm in the laboratory that is hurt again and again: is every microbatch counted once, and how fast
is it whole again?

Homes with slow uplinks (root), four stages, each held by several volunteers. Every half minute something
happens to one of them or to the coordinator, as the seed has it: killed and started again, its worker killed,
frozen for two leases, cut off, its uplink slow. At the end all is healed, and the run must go on. Then the
volunteers' signed logs are audited, and every loss is compared with one machine's. With `--mode grouped` they
are clusters that train batches of their own and average (docs/grouped.md).

Recovery: from the fault to the commit of the first step that began after it, less a step's usual time
(peer/demo/demo_run.py). Goodput: what was counted of all forwards that were computed, in microbatches times
blocks.

    make chaos
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import report
from benchmarks.swarm import Model, Site, Swarm, endless, make_run, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.peer.demo.demo_report import collect_evidence
from hetpeer.peer.demo.demo_run import recovery_seconds
from hetpeer.peer.process.hetpeer_children import end_all
from hetpeer.peer.watching.perfetto import perfetto
from hetpeer.stages.block.offload import Offload
from tests.wanlab.chaos import KINDS, Chaos, Fault, homes
from tests.wanlab.lab import Lab

STAGES = 4
LEASE_S = 10.0
WARM_UP_STEPS, HEALED_STEPS, HEALED_S = 3, 3, 90.0
LOOK_S = 0.05
MICROBATCHES = 12
GOODPUT = 0.8
KILLED_S, AWAY_S = 6.0, LEASE_S + 5.0
"""Goals: the middle of those that died, the longest of those that were frozen or cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How many volunteers are hurt for how long, and how often."""

    peers: int = 12
    minutes: float = 20.0
    every_s: float = 30.0
    kinds: Sequence[str] = KINDS
    seed: int = 0
    offload: str = "auto"
    """As of `join`."""
    dtype: Literal["float32", "bf16"] = "float32"
    mode: Literal["exact", "grouped"] = "exact"
    """As of `init`."""

    @property
    def averaging(self) -> AveragingSettings | None:
        """Settings of averagings; None: exact."""
        return AveragingSettings() if self.mode == "grouped" else None


Beside = Callable[[Swarm], Coroutine[Any, Any, None]]


async def _nothing(_swarm: Swarm) -> None:
    """Who only wants to know what came of it."""


async def train(trial: Trial, folder: Path, beside: Beside = _nothing) -> dict[str, Any]:
    """Make a run in `folder`, train it through the trial, and look at what came of it. Needs root.

    `beside` runs from the first fault on until all is healed, and is cancelled then; what it raises is raised
    at the end.
    """
    with Lab(homes(trial.peers)) as lab:
        return await _train(trial, lab, folder, beside)


async def _train(trial: Trial, lab: Lab, folder: Path, beside: Beside) -> dict[str, Any]:
    training = endless(MICROBATCHES, checkpoint_every=10).model_copy(update={"dtype": trial.dtype})
    model = Model(width=32, heads=2, sequence_length=32)
    run = make_run(folder, model, STAGES, training, trial.seed, averaging=trial.averaging)
    options = "--trace", "--offload", trial.offload
    async with running(run, folder, trial.peers, *options, site=Site(lab=lab)) as swarm:
        await swarm.until(WARM_UP_STEPS, 240.0)
        chaos = Chaos(swarm, lab, trial.peers, LEASE_S, trial.kinds, trial.seed)
        began, before = time.monotonic(), done(swarm)
        due = began
        watching = asyncio.create_task(beside(swarm))
        while time.monotonic() - began < 60 * trial.minutes:
            if time.monotonic() >= due:
                chaos.strike()
                due += trial.every_s
            await look(swarm)
        chaos_s, chaos_steps = time.monotonic() - began, done(swarm) - before
        await chaos.healed()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        alive_after = time.monotonic()
        healed = done(swarm) + HEALED_STEPS
        while done(swarm) < healed and time.monotonic() - alive_after < HEALED_S:
            await look(swarm)
        goes_on = done(swarm) >= healed
        await end_all([swarm.bootstrap])  # before the volunteers: or their farewells would take the run back
        swarm.feed.poll()
    collect_evidence(run, map(swarm.home, range(1, trial.peers + 1)))
    executed = forwards(folder)
    steps = done(swarm)
    verdict = audit(run.path)
    replayed = replay(run.path)
    expected = steps if trial.averaging is None else replayed.steps
    recovery = recoveries(chaos.faults, swarm)
    goodput = verdict.counted * len(run.manifest.blocks) / max(executed, 1)
    met = {
        "exactly once": verdict.ok and replayed.ok and replayed.equal == expected,
        "goes on after healing": goes_on,
        "killed": _within(recovery, ("kill", "kill worker"), KILLED_S, statistics.median),
        "frozen or cut off": _within(recovery, ("freeze", "cut"), AWAY_S, max),
        "goodput": goodput >= GOODPUT,
    }
    return {
        "peers": trial.peers,
        "minutes": trial.minutes,
        "offload": trial.offload,
        "dtype": trial.dtype,
        "mode": trial.mode,
        "dissolved": sum(one.record["kind"] == "dissolved" for one in swarm.feed.seen),
        "faults": len(chaos.faults),
        "faults_by_kind": {kind: len(seconds) for kind, seconds in recovery.items()},
        "recovery_s": recovery,
        "steps": steps,
        "steps_a_minute": round(60 * chaos_steps / chaos_s, 1),
        "usual_step_s": round(swarm.feed.step_seconds(), 2),
        "rollbacks": verdict.rollbacks,
        "executed_block_microbatches": executed,
        "goodput": round(goodput, 3),
        "audit": {"ok": verdict.ok, **asdict(verdict)},
        "replay": replayed.document(),
        "goals": met,
        "met": all(met.values()),
    }


def done(swarm: Swarm) -> int:
    """Updates of the surviving history; all updates of clusters, if they train batches of their own."""
    if swarm.run.manifest.averaging is None:
        return swarm.feed.history.version
    return sum(one.record["kind"] == "commit" for one in swarm.feed.seen)


async def look(swarm: Swarm) -> None:
    await asyncio.sleep(LOOK_S)
    swarm.feed.poll()


def recoveries(faults: list[Fault], swarm: Swarm) -> dict[str, list[float | None]]:
    """Kind → seconds of each of its faults; None: the run had not recovered by its end."""
    found: dict[str, list[float | None]] = {}
    for fault in faults:
        seconds = recovery_seconds(swarm.feed.seen, fault.at)
        found.setdefault(fault.kind, []).append(None if seconds is None else round(seconds, 1))
    return found


def _within(recovery: Mapping[str, list[float | None]], kinds: tuple[str, ...], goal: float, of: Any) -> bool:
    seconds = [one for kind in kinds for one in recovery.get(kind, ())]
    return not seconds or bool(None not in seconds and of(seconds) <= goal)


def forwards(folder: Path) -> int:
    """Blocks times training microbatches that were computed forward, by all traces."""
    return sum(
        event["args"]["blocks"]
        for event in perfetto(folder)["traceEvents"]
        if event["ph"] == "X" and event["name"].startswith("Forward") and event["args"]["train"]
    )


def show(figures: dict[str, Any]) -> None:
    verdict, replayed = figures["audit"], figures["replay"]
    print(
        f"{figures['peers']} peers, {figures['minutes']} minutes, {figures['faults']} faults: "
        f"{figures['steps']} steps"
        f" ({figures['steps_a_minute']} a minute, {figures['usual_step_s']} s each as a rule), "
        f"{figures['rollbacks']} rollbacks, {figures['dissolved']} clusters dissolved"
    )
    for kind, seconds in figures["recovery_s"].items():
        known = [one for one in seconds if one is not None]
        middle = f"middle {statistics.median(known):.1f} s, longest {max(known):.1f} s" if known else "never"
        print(f"  {kind:17} {len(seconds):3} times: whole again after {middle}")
    print(
        f"  microbatches: {verdict['counted']} of {verdict['microbatches_expected']} counted exactly once,"
        f" {verdict['lost']} lost, {verdict['duplicated']} doubled, {verdict['leftovers']} through the task "
        "board"
    )
    print(f"  replay: {replayed['equal']} of {replayed['steps']} steps equal to the last bit")
    print(f"  goodput: {figures['goodput']:.0%} of what was computed was counted")
    for problem in (*verdict["problems"][:10], *replayed["problems"][:10]):
        print(f"  problem: {problem}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    usual = Trial()
    for name, value, text in (
        ("peers", usual.peers, "volunteers"),
        ("minutes", usual.minutes, "of chaos"),
        ("every", usual.every_s, "seconds between two faults"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        "--kinds", nargs="+", choices=sorted(set(KINDS)), default=KINDS, help="only these faults"
    )
    parser.add_argument(
        "--offload", choices=("auto", *Offload), default=usual.offload, help="as of `hetpeer join`"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bf16"), default=usual.dtype, help="as of `hetpeer init`"
    )
    parser.add_argument(
        "--mode", choices=("exact", "grouped"), default=usual.mode, help="as of `hetpeer init`"
    )
    parser.add_argument("--keep", type=Path, help="leave logs and traces in this folder")
    options = parser.parse_args()
    trial = Trial(
        peers=options.peers,
        minutes=options.minutes,
        every_s=options.every,
        kinds=options.kinds,
        seed=options.seed,
        offload=options.offload,
        dtype=options.dtype,
        mode=options.mode,
    )
    with tempfile.TemporaryDirectory(prefix="hetpeer-chaos-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        figures = asyncio.run(train(trial, folder))
    usual_memory = (options.offload, options.dtype) == (usual.offload, usual.dtype)
    name = "chaos-some" if options.kinds != KINDS else "chaos" if usual_memory else "chaos-offload"
    name = name if options.mode == usual.mode else f"{name}-grouped"
    return report.finish(name, figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
