"""Cost of a volunteer's daemon while it does nothing, and whether anything in it grows while others
come and go.

Idle: a run of two stages and one volunteer, with its dashboard, at which nobody looks. First it waits for
others, its blocks loaded, then its owner has paused it. Of all its processes, for a minute each: processor
time, in shares of one core, and RSS.

Faults: the swarm of benchmarks/chaos.py (root), where something happens to somebody every half minute. RSS
and descriptors of every process are sampled; of those that have lived long enough in the last twenty minutes,
the line through each one's RSS by least squares says what it grows in an hour. The coordinator is left alive:
or its own memory would not be seen.

    python -m benchmarks.idle --minutes 30
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks import chaos, report
from benchmarks.lives import Life, Watch, slope
from benchmarks.memory import KINDS
from benchmarks.swarm import WITHOUT_END, Model, Swarm, cpu_seconds, make_run, running
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest
from tests.wanlab.chaos import KINDS as FAULTS

DASHBOARD = "127.0.0.1:0"
START_S = 180.0
SETTLED_S = 20.0
"""After that nothing is left of the start, or of the life that a pause has ended."""
SAMPLE_S = 5.0
TOLD_S = 120.0
"""Between two samples of RSS in the result: whether what grew did so in one step, or goes on."""
WINDOW_S = 1200.0
WARM_UP_S = 120.0
"""Warm-up of a process: caches fill, the allocator settles."""
LIVED_S = 600.0
"""A process that lived for less of the window says nothing of an hour."""
FILES_MORE = 8
"""Descriptors in the window's later half above the most of its earlier one: links come and go."""
GOALS = {"cpu": 0.01, "mib_per_hour": 2.0}


# ── idle ────────────────────────────────────────────────────────────────────────────────────────────────────


async def idle(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """State → what each process of the volunteer takes in it."""
    run = make_run(folder, Model(), 2, WITHOUT_END, options.seed)
    found = {}
    async with running(run, folder, 1, "--dashboard", DASHBOARD) as swarm:
        await _is(swarm, "waiting", "no_peers")
        found["waiting"] = await _takes(swarm, options.seconds)
        await asyncio.to_thread(ask, swarm.home(1), ControlRequest(do="pause"))
        await _is(swarm, "paused", "user")
        found["paused"] = await _takes(swarm, options.seconds)
        await _is(swarm, "paused", "user")
    return found


async def _is(swarm: Swarm, state: str, reason: str) -> None:
    """Return when the volunteer is idle in this way, and has been for a while."""
    since = None
    async with asyncio.timeout(START_S):
        while since is None or time.monotonic() - since < SETTLED_S:
            await asyncio.sleep(1.0)
            swarm.check()
            if not (swarm.home(1) / "control.sock").exists():
                continue
            standing = await asyncio.to_thread(ask, swarm.home(1), ControlRequest(do="status"))
            since = (
                (since or time.monotonic()) if (standing.state, standing.reason) == (state, reason) else None
            )


async def _takes(swarm: Swarm, seconds: float) -> dict[str, dict[str, float]]:
    """Share of a core and MiB by process, and in all; beside it the reliable peer's share, which serves
    the run.
    """
    kinds = KINDS | {"bootstrap": "reliable daemon", "bootstrap p2pd": "reliable p2pd"}
    groups = swarm.processes()
    processes = {what: groups[kind][0] for kind, what in kinds.items() if groups[kind]}
    before, began = cpu_seconds([*processes.values()]), time.monotonic()
    await asyncio.sleep(seconds)
    after, passed = cpu_seconds([*processes.values()]), time.monotonic() - began
    shares = [(late - early) / passed for early, late in zip(before, after, strict=True)]
    cpu = {what: round(share, 4) for what, share in zip(processes, shares, strict=True)}
    ours = [what for what in processes if what in KINDS.values()]
    rss = {what: _rss_mib(processes[what]) for what in ours}
    cpu["all"], rss["all"] = (round(sum(part[what] for what in ours), 4) for part in (cpu, rss))
    return {"cpu": cpu, "rss_mib": rss}


def _rss_mib(process: psutil.Process) -> float:
    return round(process.memory_info().rss / 2**20, 1)


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────


async def faults(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Outcome of the run, and what grew. Needs root."""
    trial = chaos.Trial(
        peers=options.peers,
        minutes=options.minutes,
        every_s=options.every,
        kinds=[kind for kind in FAULTS if kind != "kill coordinator"],
        seed=options.seed,
    )
    watches: list[Watch] = []

    async def beside(swarm: Swarm) -> None:
        watches.append(watch := Watch(swarm))
        while True:
            await asyncio.to_thread(watch.sample)
            await asyncio.sleep(SAMPLE_S)

    came_of_it = await chaos.train(trial, folder, beside)
    processes = growths(watches[0].lives)
    return {
        "peers": trial.peers,
        "minutes": trial.minutes,
        "faults": came_of_it["faults"],
        "steps": came_of_it["steps"],
        "exactly_once": came_of_it["goals"]["exactly once"],
        "goes_on": came_of_it["goals"]["goes on after healing"],
        "lives": len(watches[0].lives),
        "processes": processes,
        "met": came_of_it["goals"]["exactly once"]
        and came_of_it["goals"]["goes on after healing"]
        and bool(processes)
        and not any(one["grows"] for one in processes),
    }


def growths(lives: Mapping[int, Life]) -> list[dict[str, Any]]:
    """Growth of each process (by pid) that lived long enough in the last WINDOW_S of all samples."""
    end = max((life.times[-1] for life in lives.values()), default=0.0)
    found = [growth(life, end - WINDOW_S) for life in lives.values()]
    return [one for one in found if one is not None]


def growth(life: Life, begin: float) -> dict[str, Any] | None:
    """How a process changed from `begin` on, in seconds of its clock; None if it did not live for LIVED_S
    of that.
    """
    begin = max(begin, life.times[0] + WARM_UP_S)
    first = next((number for number, then in enumerate(life.times) if then >= begin), len(life.times))
    times = life.times[first:]
    if not times or times[-1] - times[0] < LIVED_S:
        return None
    middle = first + len(times) // 2
    rss, private = (
        round(3600 * slope(times, values[first:]), 2) for values in (life.rss_mib, life.private_mib)
    )
    early, late = max(life.files[first:middle]), max(life.files[middle:])
    return {
        "kind": life.kind,
        "minutes": round((times[-1] - times[0]) / 60, 1),
        "rss_mib": [
            round(mib, 1) for mib in (*life.rss_mib[first : -1 : round(TOLD_S / SAMPLE_S)], life.rss_mib[-1])
        ],
        "mib_per_hour": rss,
        "private_mib_per_hour": private,
        "files": [early, late],
        "grows": rss > GOALS["mib_per_hour"] or late > early + FILES_MORE,
    }


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    for place in ("idle", "faults"):
        (folder / place).mkdir()
    states = await idle(options, folder / "idle")
    hurt = await faults(options, folder / "faults") if options.minutes else None
    cheap = all(one["cpu"]["all"] <= GOALS["cpu"] for one in states.values())
    return {
        "seconds": options.seconds,
        "idle": states,
        "faults": hurt,
        "goals": GOALS,
        "met": cheap and (hurt is None or hurt["met"]),
    }


def show(figures: dict[str, Any]) -> None:
    for state, one in figures["idle"].items():
        shares = ", ".join(f"{what} {share:.2%}" for what, share in one["cpu"].items())
        memory = ", ".join(f"{what} {mib:.0f}" for what, mib in one["rss_mib"].items())
        print(f"{state:8} of a core: {shares}\n         MiB: {memory}")
    if (hurt := figures["faults"]) is not None:
        print(
            f"{hurt['minutes']:g} minutes, {hurt['faults']} faults, {hurt['steps']} steps:"
            f" {len(hurt['processes'])} of {hurt['lives']} processes lived long enough"
        )
        for one in sorted(hurt["processes"], key=lambda one: one["kind"]):
            print(
                f"  {one['kind']:15} {one['minutes']:4.1f} min, {one['rss_mib'][-1]:6.1f} MiB, "
                f"{one['mib_per_hour']:+.2f} an hour"
                f" ({one['private_mib_per_hour']:+.2f} private), files {one['files'][0]}, then "
                f"{one['files'][1]}" + ("  GROWS" if one["grows"] else "")
            )
        print(f"  exactly once: {hurt['exactly_once']}; it goes on: {hurt['goes_on']}")
    print(f"goals: 1 % of a core, 2 MiB an hour, no more files: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    usual = chaos.Trial()
    parser.add_argument("--seconds", type=float, default=60.0, help="of each idle state (default: 60)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults; 0: none (default: 30)")
    parser.add_argument(
        "--peers", type=int, default=usual.peers, help=f"that are hurt (default: {usual.peers})"
    )
    parser.add_argument(
        "--every",
        type=float,
        default=usual.every_s,
        help=f"seconds between faults (default: {usual.every_s:g})",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-idle-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("idle" if options.minutes else "idle-quiet", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
