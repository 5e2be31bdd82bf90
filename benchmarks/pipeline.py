"""How fast is a swarm of four stages on one machine, against the same training in one process?

Three opponents train the same run (model, microbatches, optimizer): a swarm of a bootstrap node and one
volunteer for each stage, over real p2pd; one process with two threads; one process with one. All are alive
all the time and take turns of a few seconds: the others are frozen (SIGSTOP) meanwhile, so a slow moment of
the machine hits all alike. A step counts if it began and ended within one turn. Turns in which other programs
used the processors are taken again, and the benchmark waits for a quiet moment; if none comes in time, the
noisy turns are shown as such.

    python -m benchmarks.pipeline --rounds 6
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks import report
from benchmarks.swarm import ENDLESS, KINDS, NEVER, Model, Swarm, cpu_seconds, make_run, running
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.base.runtime import dying_with_us

WARM_UP_STEPS = 5
WARM_UP_S = 180.0
ALIVE_S, LISTEN_S = 0.5, 3.0
"""While others are busy the swarm lives for a moment, so that no lease runs out, and then holds still to
listen.
"""
GOAL = 0.8


@dataclass(slots=True)
class Turn:
    """One opponent's turn: the durations of its whole steps, and what the processors did."""

    ends: Sequence[float]
    """When its steps ended, in monotonic seconds."""
    wall_s: float
    cpu_s: dict[str, list[float]]
    """CPU seconds of each process, by kind, in the turn."""
    others: float
    """Processors that other programs kept busy, on average."""

    @property
    def steps_s(self) -> list[float]:
        """Durations of the steps that began and ended in this turn."""
        return [end - begin for begin, end in itertools.pairwise(self.ends)]


class Opponent(Protocol):
    name: str

    def groups(self) -> dict[str, list[psutil.Process]]: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def ends(self) -> Sequence[float]:
        """Monotonic times at which steps ended."""


class SwarmOpponent:
    name = "swarm"

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.freeze, self.thaw = swarm.freeze, swarm.thaw

    def groups(self) -> dict[str, list[psutil.Process]]:
        return dict(self.swarm.processes())

    def ends(self) -> Sequence[float]:
        return [seen.at for seen in self.swarm.feed.seen if seen.record["kind"] == "commit"]


class AloneOpponent:
    """benchmarks/alone.py with so many threads."""

    def __init__(self, threads: int, process: asyncio.subprocess.Process) -> None:
        self.name = f"one process, {threads} thread{'s' * (threads > 1)}"
        self._process = process
        self._ends: list[float] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, run: RunDirectory, threads: int) -> AloneOpponent:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "benchmarks.alone", str(run.path), f"--threads={threads}"),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            preexec_fn=dying_with_us(),
        )
        return cls(threads, process)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._ends.append(json.loads(line)["ended"])

    async def warm(self) -> None:
        async with asyncio.timeout(WARM_UP_S):
            while len(self._ends) < WARM_UP_STEPS:
                if self._reading.done():
                    raise SystemExit("the process that trains alone died; its error stands above")
                await asyncio.sleep(0.05)

    def groups(self) -> dict[str, list[psutil.Process]]:
        return {"process": [psutil.Process(self._process.pid)]}

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def ends(self) -> Sequence[float]:
        return self._ends

    async def end(self) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading


@dataclass(slots=True)
class Contest:
    """Turns of each opponent by name; those beside busy others are kept apart."""

    quiet: dict[str, list[Turn]] = field(default_factory=dict)
    noisy: dict[str, list[Turn]] = field(default_factory=dict)

    async def round(self, opponents: Sequence[Opponent], swarm: Swarm, turn_s: float, noise: float) -> None:
        for opponent in opponents:
            turn = await take_turn(opponent, swarm, turn_s)
            (self.quiet if turn.others <= noise else self.noisy).setdefault(opponent.name, []).append(turn)

    def turns(self, name: str) -> list[Turn]:
        return self.quiet.get(name) or self.noisy[name]


async def take_turn(opponent: Opponent, swarm: Swarm, turn_s: float) -> Turn:
    """Thaw `opponent` for so long. The swarm is read all the time: that is nothing beside a turn."""
    groups = opponent.groups()
    known = len(opponent.ends())
    busy, began = _machine_busy(), time.monotonic()
    before = {kind: cpu_seconds(group) for kind, group in groups.items()}
    opponent.thaw()
    while time.monotonic() < began + turn_s:
        await asyncio.sleep(0.004)
        swarm.feed.poll()
    swarm.check()
    opponent.freeze()
    wall = time.monotonic() - began
    busy = _machine_busy() - busy
    cpu = {
        kind: [after - was for after, was in zip(cpu_seconds(group), before[kind], strict=True)]
        for kind, group in groups.items()
    }
    ours = sum(sum(seconds) for seconds in cpu.values())
    return Turn(
        ends=opponent.ends()[known:],
        wall_s=wall,
        cpu_s=cpu,
        others=max(0.0, busy - ours) / wall,
    )


def _machine_busy() -> float:
    """CPU seconds that all processors worked since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


async def contend(options: Any, folder: Path) -> dict[str, Any]:
    model = Model(width=options.width, layers=options.layers, sequence_length=options.sequence_length)
    training = TrainingSettings(
        steps=ENDLESS,
        batch_size=options.batch_size,
        microbatch_size=options.microbatch_size,
        eval_every=NEVER,
        eval_microbatches=1,
        checkpoint_every=NEVER,
    )
    run = make_run(folder, model, options.stages, training, options.seed)
    alone: list[AloneOpponent] = []
    try:
        for threads in (2, 1):
            alone.append(await AloneOpponent.start(run, threads))
            await alone[-1].warm()
            alone[-1].freeze()
        async with running(run, folder, options.stages) as swarm:
            await swarm.until(WARM_UP_STEPS, WARM_UP_S)
            swarm.freeze()
            contest = await _contest(options, swarm, alone)
            return judge(contest, run, swarm)
    finally:
        for one in alone:
            await one.end()


async def _contest(options: Any, swarm: Swarm, alone: Sequence[AloneOpponent]) -> Contest:
    contest, ours = Contest(), SwarmOpponent(swarm)
    names = [ours.name, *(one.name for one in alone)]
    give_up = time.monotonic() + options.limit_s
    while any(len(contest.quiet.get(name, ())) < options.rounds for name in names):
        await _quiet(swarm, options.noise, give_up)
        if contest.noisy and time.monotonic() > give_up:
            break
        # The swarm is frozen for one turn at a time: longer, and its leases would run out.
        for other in alone:
            await contest.round((ours, other), swarm, options.turn_s, options.noise)
    return contest


async def _quiet(swarm: Swarm, noise: float, give_up: float) -> None:
    """Wait until others leave the processors alone, at the latest until `give_up`."""
    others = math.inf
    while others > noise and time.monotonic() < give_up:
        swarm.thaw()
        await asyncio.sleep(ALIVE_S)
        swarm.freeze()
        busy = _machine_busy()
        await asyncio.sleep(LISTEN_S)
        others = (_machine_busy() - busy) / LISTEN_S


def judge(contest: Contest, run: RunDirectory, swarm: Swarm) -> dict[str, Any]:
    training = run.manifest.training
    tokens = training.batch_size * run.manifest.data.tokens_per_sample
    opponents: dict[str, dict[str, Any]] = {}
    for name in sorted(contest.quiet.keys() | contest.noisy.keys()):
        turns = contest.turns(name)
        medians = [statistics.median(turn.steps_s) for turn in turns if turn.steps_s]
        step = statistics.median(medians) if medians else math.inf
        ended = sum(len(turn.ends) for turn in turns)
        cpu = sum(sum(map(sum, turn.cpu_s.values())) for turn in turns)
        opponents[name] = {
            "tokens_per_second": round(tokens / step, 1),
            "medians_s": [round(one, 4) for one in medians],
            "cpu_s_per_step": round(cpu / max(1, ended), 3),
            "quiet": name in contest.quiet,
            "others_busy": round(statistics.fmean(turn.others for turn in turns), 3),
        }
    speed = opponents["swarm"]["tokens_per_second"]
    ratios = {
        name: round(speed / one["tokens_per_second"], 3)
        for name, one in opponents.items()
        if name != "swarm" and one["tokens_per_second"]
    }
    return {
        "parameters": sum(block.parameter_count for block in run.manifest.blocks),
        "stages": len(run.manifest.layouts[0]),
        "tokens_per_step": tokens,
        "opponents": opponents,
        "swarm_against": ratios,
        "met": ratios.get("one process, 2 threads", 0.0) >= GOAL,
        "swarm_time": where_time_goes(contest.turns("swarm"), swarm),
    }


def where_time_goes(turns: Sequence[Turn], swarm: Swarm) -> dict[str, Any]:
    """Processors busy by kind of process, workers one by one; and the parts of a step."""
    wall = sum(turn.wall_s for turn in turns)
    steps = max(1, sum(len(turn.ends) for turn in turns))
    cpu = {kind: sum(sum(turn.cpu_s[kind]) for turn in turns) for kind in KINDS}
    stages = sorted((swarm.stage_of(worker), i) for i, worker in enumerate(swarm.processes()["worker"]))
    whole = {end for turn in turns for end in turn.ends[1:]}
    commits = [s.record for s in swarm.feed.seen if s.record["kind"] == "commit" and s.at in whole]
    to_commit = statistics.median(record["seconds"] for record in commits)
    reduce = statistics.median(record["reduce_seconds"] for record in commits)
    step = statistics.median(seconds for turn in turns for seconds in turn.steps_s)
    parts = {"tasks": to_commit - reduce, "reduce and vote": reduce, "commit to begin": step - to_commit}
    return {
        "cpu_s_per_step": {kind: round(seconds / steps, 4) for kind, seconds in cpu.items()},
        "processors_busy": {kind: round(seconds / wall, 3) for kind, seconds in cpu.items()},
        "processors_idle_or_others": round((os.cpu_count() or 1) - sum(cpu.values()) / wall, 3),
        "worker_busy": {
            f"blocks {begin}-{end - 1}": round(sum(turn.cpu_s["worker"][i] for turn in turns) / wall, 3)
            for (begin, end), i in stages
        },
        "parts_of_a_step_s": {name: round(seconds, 4) for name, seconds in parts.items()},
    }


def show(result: dict[str, Any]) -> None:
    sizes = (result["parameters"], result["stages"], result["tokens_per_step"])
    print("{:,} parameters, {} stages, {} tokens a step".format(*sizes))
    for name, one in result["opponents"].items():
        medians = " ".join(f"{median:.3f}" for median in one["medians_s"])
        noise = "" if one["quiet"] else f"  (NOISY: others kept {one['others_busy']} processors busy)"
        print(
            f"  {name:24} {one['tokens_per_second']:8.0f} tokens/s, {one['cpu_s_per_step']:.2f} CPU s a step;"
            f" median steps of each turn, s: {medians}{noise}"
        )
    for name, ratio in result["swarm_against"].items():
        print(f"  swarm : {name:24} {ratio:.2f}")
    spent = result["swarm_time"]
    idle = spent["processors_idle_or_others"]
    for title, values, unit in (
        ("CPU seconds of a step", spent["cpu_s_per_step"], ""),
        ("processors busy", spent["processors_busy"] | {"idle or others": idle}, ""),
        ("workers busy", spent["worker_busy"], ""),
        ("parts of a step", spent["parts_of_a_step_s"], " s"),
    ):
        print(f"  {title:22} " + ", ".join(f"{name} {value:.3f}{unit}" for name, value in values.items()))
    print(f"  goal {GOAL} of two threads: {'met' if result['met'] else 'NOT met'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("width", 512, "of the model"),
        ("layers", 4, "of the model"),
        ("sequence-length", 64, "tokens"),
        ("batch-size", 32, "samples of a step"),
        ("microbatch-size", 4, "samples"),
        ("stages", 4, "and volunteers"),
        ("rounds", 6, "quiet turns of each opponent"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--turn-s", type=float, default=6.0, help="length of a turn, below a lease")
    parser.add_argument(
        "--noise", type=float, default=0.2, help="processors that others may keep busy in a turn"
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="wait no longer for quiet turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
        figures = asyncio.run(contend(options, Path(folder)))
    return report.finish("pipeline", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
