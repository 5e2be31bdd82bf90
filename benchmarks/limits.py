"""Do limits hold, and does the swarm lose anything? Real processes on loopback, whose limits are changed
while they train.

Three volunteers of two stages: the upload of the only one of its stage, by what the kernel says that its
processes have sent over TCP (`ss`; p2pd, and the daemon past it), with everything that we do not count; then
one of the others is paused: how long its processes take more than QUIET of a core. A volunteer by itself: its
cores, by the processor time of its daemon, p2pd and worker, which has to be more than one without the limit.
The middle of some rounds; at the end the audit has to find every microbatch counted once, and no step may
have been rolled back.

    python -m benchmarks.limits --rounds 5
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.swarm import ENDLESS, NEVER, Model, Swarm, make_run, running
from hetpeer.bootstrap.audit.audit import AuditVerdict, audit
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest
from hetpeer.peer.limits.config_file import CONFIG_FILE, write

VOLUNTEERS, STAGES = 3, 2
MODEL = Model(width=256, layers=2, heads=4, sequence_length=128)
"""Little to compute for what it sends: 256 KiB a microbatch and border, not shrunk."""
LARGE = Model(width=512, layers=4, heads=8, sequence_length=128)
"""Enough to compute for two cores."""
MBIT = 1e6 / 8
LOOKED_AT = 3
"""Steps after which everybody's log says which blocks are its own."""
SETTLE_S = 5.0
WATCH_S = 4.0
WINDOW_S = 0.5
QUIET = 0.1
SAMPLE_S = 0.05
WITHIN_S = 600.0
JUDGED_TIMES = 60
GOALS = {"up": 0.05, "cpu": 0.1, "pause_s": 1.0}


def sent(pids: set[int]) -> dict[str, int]:
    """Connection of these processes → bytes that they have sent over it."""
    lines = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for line in lines:
        owner = re.search(r"pid=(\d+),", line)
        if owner and int(owner[1]) in pids and (count := re.search(r"bytes_sent:(\d+)", line)):
            found[" ".join(line.split()[3:5])] = int(count[1])
    return found


async def sending(swarm: Swarm, number: int, seconds: float) -> float:
    """Bytes/s that volunteer `number` sends; what goes over a connection that ends is counted until a
    moment before.
    """
    pids = {one.pid for one in swarm.family(number)}
    before = latest = sent(pids)
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        await asyncio.sleep(min(0.5, seconds - passed))
        latest = latest | sent(pids)
    return sum(count - before.get(place, 0) for place, count in latest.items()) / passed


def spent(swarm: Swarm, number: int) -> dict[int, float]:
    """Process of volunteer `number` → its CPU seconds so far."""
    found = {}
    for process in swarm.family(number):
        with suppress(psutil.NoSuchProcess):
            found[process.pid] = sum(process.cpu_times()[:2])
    return found


async def computing(swarm: Swarm, number: int, seconds: float) -> float:
    """Cores that it takes in the middle. Its processes are the same all the time."""
    before, began = spent(swarm, number), time.monotonic()
    await asyncio.sleep(seconds)
    after = spent(swarm, number)
    return sum(after[pid] - before.get(pid, 0.0) for pid in after) / (time.monotonic() - began)


async def pausing(swarm: Swarm, number: int) -> float:
    """Seconds from the request on until its processes are quiet, and stay so."""
    samples: list[tuple[float, float]] = []
    known = spent(swarm, number)
    asked = time.monotonic()
    await asyncio.to_thread(ask, swarm.home(number), ControlRequest(do="pause"))
    while (now := time.monotonic() - asked) < WATCH_S:
        known |= spent(swarm, number)  # who is gone has spent what it had
        samples.append((now, sum(known.values())))
        await asyncio.sleep(SAMPLE_S)
    await asyncio.to_thread(ask, swarm.home(number), ControlRequest(do="resume"))
    busy = [
        then
        for then, total in samples
        if any(
            later - then <= WINDOW_S and more - total > QUIET * WINDOW_S
            for later, more in samples
            if later > then
        )
    ]
    return max(busy, default=0.0)


async def change(swarm: Swarm, number: int, key: str, value: str) -> None:
    """A setting of a volunteer that runs, as `hetpeer config set` has it changed."""
    await asyncio.to_thread(ask, swarm.home(number), ControlRequest(do="set", key=key, value=value))


async def one_round(swarm: Swarm, alone: int, other: int, options: Any) -> dict[str, float]:
    found = {"free_up": await sending(swarm, alone, options.seconds) / MBIT}
    await change(swarm, alone, "limits.up", f"{options.mbit}mbit")
    await asyncio.sleep(SETTLE_S)
    found["up"] = await sending(swarm, alone, options.seconds) / MBIT
    await change(swarm, alone, "limits.up", "none")
    found["pause_s"] = await pausing(swarm, other)
    return found


def training(microbatches: int) -> TrainingSettings:
    return TrainingSettings(
        steps=ENDLESS,
        batch_size=microbatches * 2,
        microbatch_size=2,
        slot_size=4,
        eval_every=NEVER,
        eval_microbatches=1,
        checkpoint_every=NEVER,
    )


async def judged(run: RunDirectory) -> AuditVerdict:
    """The audit's words once the volunteers' logs have come up to the last commit; what is lost stays
    lost.
    """
    verdict = audit(run.path)
    for _ in range(JUDGED_TIMES):
        if verdict.ok:
            break
        await asyncio.sleep(WINDOW_S)
        verdict = audit(run.path)
    return verdict


async def together(options: Any, folder: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Rounds of a run of several volunteers, and what it has lost."""
    run = make_run(folder, MODEL, STAGES, training(options.microbatches), options.seed)
    rounds = []
    async with running(run, folder, VOLUNTEERS) as swarm:
        await swarm.until(LOOKED_AT, WITHIN_S)
        workers = {number: worker for number in swarm.volunteers if (worker := swarm.worker(number))}
        places = {number: swarm.stage_of(worker) for number, worker in workers.items()}
        held = Counter(places.values())
        alone = next(number for number, place in places.items() if held[place] == 1)
        other = next(number for number, place in places.items() if held[place] > 1)
        for _ in range(options.rounds):
            rounds.append(await one_round(swarm, alone, other, options))
            print(rounds[-1], file=sys.stderr, flush=True)
            await swarm.until(swarm.feed.history.version + 2, WITHIN_S)
        kinds = Counter(str(seen.record["kind"]) for seen in swarm.feed.seen)
        verdict = await judged(run)
    return rounds, {
        "steps": kinds["commit"],
        "rollbacks": kinds["rollback"],
        "problems": list(verdict.problems),
    }


async def on_cores(options: Any, folder: Path) -> list[dict[str, float]]:
    """Rounds of a volunteer that has all blocks and always something to compute, on two threads that are
    nobody's second.
    """
    run = make_run(folder, LARGE, 1, training(options.microbatches), options.seed)
    write(folder / "home-1" / CONFIG_FILE, "limits.nice", "0")
    rounds = []
    async with running(run, folder, 1, "--threads", "2") as swarm:
        await swarm.until(1, WITHIN_S)
        for _ in range(options.rounds):
            found = {"free_cpu": await computing(swarm, 1, options.seconds)}
            await change(swarm, 1, "limits.cpu", "1")
            found["cpu"] = await computing(swarm, 1, options.seconds)
            await change(swarm, 1, "limits.cpu", "0")
            rounds.append(found)
            print(found, file=sys.stderr, flush=True)
    return rounds


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    for place in ("cores", "together"):
        (folder / place).mkdir()
    alone = await on_cores(options, folder / "cores")
    many, lost = await together(options, folder / "together")
    rounds = [one | other for one, other in zip(alone, many, strict=True)]
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratios = {"up": middle["up"] / options.mbit, "cpu": middle["cpu"]}
    return {
        "mbit": options.mbit,
        "seconds": options.seconds,
        "middle": middle,
        "ratios": ratios,
        "rounds": rounds,
        **lost,
        "met": abs(ratios["up"] - 1) <= GOALS["up"]
        and ratios["cpu"] <= 1 + GOALS["cpu"] < middle["free_cpu"]
        and middle["pause_s"] <= GOALS["pause_s"]
        and not lost["problems"]
        and not lost["rollbacks"],
    }


def show(figures: dict[str, Any]) -> None:
    middle, ratios = figures["middle"], figures["ratios"]
    print(
        f"upload    {middle['free_up']:6.2f} Mbit/s free, {middle['up']:.2f} of {figures['mbit']}: "
        f"{ratios['up']:.3f}"
    )
    print(f"processor {middle['free_cpu']:6.2f} cores free, {middle['cpu']:.2f} of 1: {ratios['cpu']:.3f}")
    if middle["free_cpu"] <= 1 + GOALS["cpu"]:
        print("          which says nothing: it did not get more without a limit, this machine is busy")
    print(f"pause     {middle['pause_s']:6.2f} s until the processor is free")
    print(
        f"{figures['steps']} steps, {figures['rollbacks']} rolled back, {len(figures['problems'])} found by "
        "the audit"
    )
    print(f"goals: 5 %, 10 %, 1 s, nothing lost: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--mbit", type=int, default=5, help="limit on the upload (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="that each of it is measured (default: 30)"
    )
    parser.add_argument("--microbatches", type=int, default=160, help="of a step (default: 160)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-limits-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("limits", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
