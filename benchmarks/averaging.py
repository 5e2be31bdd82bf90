"""A reduce on slow lines: hetpeer's, as it happens in a run, beside torch's all-reduce over gloo and
hivemind's averager.

Every peer has the whole model, a table of so many float32 parameters; a step computes next to nothing and
then reduces its gradient. hetpeer's time is the coordinator's: from its plan to the last vote on the hash;
with sums sent in 8 bits it is shown beside. The others' is the slowest peer's, of the all-reduce alone
(hivemind's matchmaking is shown beside it). In the laboratory (root) every peer has its own line; the last
setting is this machine's loopback. The bound is that of a linear program over all ways to divide the sums
(docs/averaging.md).

    python -m benchmarks.averaging
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scipy.optimize import linprog

from benchmarks import report
from benchmarks.swarm import NEVER, Site, running
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import LinkSettings, ReduceCodecName, TrainingSettings
from hetpeer.dht.base.errors import HetpeerError
from hetpeer.peer.process.hetpeer_children import Child, end_all
from tests.wanlab.lab import Lab

LATENCY_MS = 5.0
SETTLE = 3
"""First rounds, which do not count: lines are not measured yet."""
WITHIN_S = 900.0
LOOK_S = 0.1
CLOSE, CLOSE_MIXED = 1.12, 1.15
"""Goals: times the bound, with equal and with mixed lines."""
BITS, FLOAT_BYTES = 8, 4
WIDTH = 64
TABLE = """
import torch
from torch import nn


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding({rows}, {width})

    def forward(self, tokens, targets):
        return (self.table(tokens).mean(-1) - targets / 256.0).square().mean()


def build():
    return Table()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Peers with these lines in Mbit/s, there as back; empty: this machine's loopback."""

    name: str
    elements: int
    peers: int
    mbps: tuple[float, ...] = ()

    @property
    def mixed(self) -> bool:
        return len(set(self.mbps)) > 1

    @property
    def bound_s(self) -> float | None:
        """No way to divide the sums is done sooner."""
        if not self.mbps:
            return None
        vector = self.elements * FLOAT_BYTES
        rates = [1e6 * rate / BITS for rate in self.mbps]
        rows = [
            [vector * (self.peers - 2) * (n == m) for m in range(self.peers)] + [-rates[n]]
            for n in range(self.peers)
        ]
        least = linprog(
            [0.0] * self.peers + [1.0], rows, [-vector] * self.peers, [[1.0] * self.peers + [0.0]], [1.0]
        )
        return float(least.fun)


def settings(seed: int) -> list[Setting]:
    draw = random.Random(seed)
    drawn = tuple(round(50 * math.exp(draw.gauss(0, 0.6)), 1) for _ in range(4))
    million = 1_000_000
    return [
        Setting(name="equal", elements=10 * million, peers=4, mbps=(100.0,) * 4),
        Setting(name="one slow", elements=10 * million, peers=4, mbps=(20.0, 100.0, 100.0, 100.0)),
        Setting(name="lognormal", elements=10 * million, peers=4, mbps=drawn),
        Setting(name="eight", elements=10 * million, peers=8, mbps=(100.0,) * 8),
        Setting(name="large", elements=40 * million, peers=4, mbps=(100.0,) * 4),
        Setting(name="loopback", elements=10 * million, peers=4),
    ]


def laboratory(setting: Setting) -> Any:
    """Node 0 has the coordinator; peer n is at node n."""
    if not setting.mbps:
        return nullcontext()
    nodes = setting.peers + 1
    lines = [1000.0, *setting.mbps]
    latency = [[0.0 if one == other else LATENCY_MS for one in range(nodes)] for other in range(nodes)]
    return Lab(
        {"nodes": nodes, "latency_ms": latency, "uplink_mbps": lines, "downlink_mbps": lines, "queue_ms": 100}
    )


@dataclass(slots=True)
class Rounds:
    """Times of one way: seconds of each round; CPU seconds of all processes in all rounds."""

    seconds: list[float]
    cpu_s: float
    matchmaking_s: list[float] | None = None


# ── the ways ────────────────────────────────────────────────────────────────────────────────────────────────


async def hetpeer(
    setting: Setting, lab: Lab | None, rounds: int, folder: Path, codec: ReduceCodecName = "none"
) -> Rounds:
    run = _make_run(setting, rounds, folder, LinkSettings(reduce=codec, feedback=True))
    async with running(run, folder, setting.peers, site=Site(lab=lab)) as swarm:
        await swarm.until(SETTLE, WITHIN_S)
        usage = Usage()
        looking = asyncio.create_task(usage.look())
        await swarm.until(SETTLE + rounds, WITHIN_S)
        looking.cancel()
        commits = [one for one in swarm.feed.seen if one.record["kind"] == "commit"][SETTLE:][:rounds]
    seconds = [one.record["reduce_seconds"] for one in commits]
    cpu_s = sum(usage.between(one.at - took, one.at) for one, took in zip(commits, seconds, strict=True))
    return Rounds(seconds, cpu_s)


class Usage:
    """Processor time of all processes so far, read ten times a second: of a step only its reduce is to
    count.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._used: list[float] = []

    async def look(self) -> None:
        """Until cancelled."""
        while True:
            self._times.append(time.monotonic())
            self._used.append(_family_cpu())
            await asyncio.sleep(LOOK_S)

    def between(self, begin: float, end: float) -> float:
        """CPU seconds."""
        used = np.interp([begin, end], self._times, self._used)
        return float(used[1] - used[0])


def _make_run(setting: Setting, rounds: int, folder: Path, links: LinkSettings) -> RunDirectory:
    module = folder / "table.py"
    module.write_text(TABLE.format(rows=setting.elements // WIDTH, width=WIDTH))
    return create_run(
        folder / "run",
        model=f"{module}:build",
        name="benchmark",
        sequence_length=8,
        stages=[1],
        links=links,
        training=TrainingSettings(
            steps=SETTLE + rounds + 1,
            batch_size=4 * setting.peers,
            microbatch_size=1,
            slot_size=1,
            eval_every=NEVER,
            eval_microbatches=1,
            checkpoint_every=NEVER,
        ),
    )


async def gloo(setting: Setting, lab: Lab | None, rounds: int, folder: Path) -> Rounds:
    address, interface = (lab.address(1), "wan0") if lab else ("127.0.0.1", "lo")
    arguments = [
        (str(setting.elements), str(rounds + 1), str(rank), str(setting.peers), address, interface)
        for rank in range(setting.peers)
    ]
    children: list[Child] = []
    try:
        for rank, own in enumerate(arguments):
            children.append(await _script("gloo_allreduce", own, lab, rank, folder))
        return await _listen(children, rounds)
    finally:
        await end_all(children)


async def hivemind(setting: Setting, lab: Lab | None, rounds: int, folder: Path) -> Rounds:
    children: list[Child] = []
    first: tuple[str, ...] = ()
    try:
        for peer in range(setting.peers):
            address = lab.address(peer + 1) if lab else "127.0.0.1"
            own = (str(setting.elements), str(rounds + 1), str(peer), str(setting.peers), address, *first)
            children.append(await _script("hivemind_averager", own, lab, peer, folder))
            if not peer:
                first = (await children[0].next_line(WITHIN_S),)
        return await _listen(children, rounds)
    finally:
        family = psutil.Process().children(recursive=True)  # its DHT and p2pd outlive it
        await end_all(children)
        for process in family:
            with suppress(psutil.Error):  # it may have ended meanwhile
                if "hivemind" in " ".join(process.cmdline()):
                    process.kill()


async def _script(name: str, arguments: Sequence[str], lab: Lab | None, number: int, folder: Path) -> Child:
    at = lab.at(number + 1, ()) if lab else ()
    command = (*at, sys.executable, "-P", "-m", f"benchmarks.baselines.{name}")
    return await Child.start(
        name, arguments, home=folder, log=folder / f"{name}-{number}.log", command=command
    )


async def _listen(children: Sequence[Child], rounds: int) -> Rounds:
    """The first round does not count. Raises RuntimeError for a wrong sum."""
    found, meeting, before = [], [], 0.0
    for number in range(rounds + 1):
        said = [json.loads(await child.next_line(WITHIN_S)) for child in children]
        if not all(one["right"] for one in said):
            raise RuntimeError(f"round {number} of {children[0].name} has a wrong sum")
        if not number:
            before = _family_cpu()
            continue
        found.append(max(one["seconds"] for one in said))
        meeting += [max(one["matchmaking"] for one in said)] if "matchmaking" in said[0] else []
    return Rounds(found, _family_cpu() - before, meeting or None)


def _family_cpu() -> float:
    """CPU seconds so far of all processes that we have started, but the laboratory's router."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if "router" not in " ".join(process.cmdline()):
                total += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return total


WAYS = {
    "hetpeer": hetpeer,
    "hetpeer int8": partial(hetpeer, codec="int8"),
    "gloo": gloo,
    "hivemind": hivemind,
}


# ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────


async def measure(setting: Setting, ways: Sequence[str], rounds: int) -> dict[str, Any]:
    """All ways in one setting, one after the other."""
    found: dict[str, Any] = {}
    moved = setting.peers * setting.elements * FLOAT_BYTES / 1e9
    for name in ways:
        with tempfile.TemporaryDirectory(prefix="hetpeer-averaging-") as scratch, laboratory(setting) as lab:
            try:
                one = await WAYS[name](setting, lab, rounds, Path(scratch))
            except (HetpeerError, RuntimeError, TimeoutError) as error:
                found[name] = {"failed": str(error)}
                continue
        middle = statistics.median(one.seconds)
        found[name] = {
            "seconds": middle,
            "of_bound": middle / setting.bound_s if setting.bound_s else None,
            "cpu_s_per_gb": one.cpu_s / rounds / moved,
            "all": [round(seconds, 3) for seconds in one.seconds],
            "matchmaking_s": statistics.median(one.matchmaking_s) if one.matchmaking_s else None,
        }
    return {
        "setting": setting.name,
        "peers": setting.peers,
        "elements": setting.elements,
        "mbps": setting.mbps,
        "bound_s": setting.bound_s,
        "ways": found,
        "goals": _judge(setting, found),
    }


def _judge(setting: Setting, found: dict[str, Any]) -> dict[str, bool]:
    ours = found.get("hetpeer", {})
    if "seconds" not in ours:
        return {"hetpeer reduces": False}
    seconds = {name: one.get("seconds", math.inf) for name, one in found.items()}
    goals = {}
    if ours["of_bound"] is not None and setting.peers <= 4:
        most = CLOSE_MIXED if setting.mixed else CLOSE
        goals[f"at most {most} of the bound"] = ours["of_bound"] <= most
    if "gloo" in found and setting.mixed:
        goals["faster than gloo's ring"] = ours["seconds"] < seconds["gloo"]
    if "hivemind" in found and setting.peers <= 4:
        goals["faster than hivemind"] = ours["seconds"] < seconds["hivemind"]
    if "hivemind" in found and setting.peers > 4:
        less = ours["cpu_s_per_gb"] < found["hivemind"].get("cpu_s_per_gb", math.inf)
        goals["less of the processor than hivemind"] = less
    return goals


def show(row: dict[str, Any]) -> None:
    bound = f", bound {row['bound_s']:.2f} s" if row["bound_s"] else ""
    lines = ", ".join(f"{rate:g}" for rate in row["mbps"]) or "loopback"
    print(f"{row['setting']}: {row['peers']} peers, {row['elements'] // 10**6}M float32, {lines}{bound}")
    for name, one in row["ways"].items():
        if "failed" in one:
            print(f"  {name:12} failed: {one['failed']}")
            continue
        of_bound = f", {one['of_bound']:.2f} of the bound" if one["of_bound"] else ""
        meeting = f", matchmaking {one['matchmaking_s']:.2f} s" if one["matchmaking_s"] else ""
        print(f"  {name:12} {one['seconds']:6.2f} s{of_bound}, {one['cpu_s_per_gb']:5.1f} CPU s/GB{meeting}")
    for goal, met in row["goals"].items():
        print(f"  {goal}: {'met' if met else 'MISSED'}", flush=True)


async def everything(options: Any) -> dict[str, Any]:
    """Measure all settings; the figures of each are saved before the next one begins."""
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {}
    for setting in settings(options.seed):
        if options.settings and setting.name not in options.settings:
            continue
        began = time.monotonic()
        rows.append(await measure(setting, options.ways, options.rounds))
        rows[-1]["took_s"] = round(time.monotonic() - began)
        met = all(all(row["goals"].values()) for row in rows)
        name = "averaging-some" if options.settings or options.ways != list(WAYS) else "averaging"
        document = report.keep(name, {"rounds": options.rounds, "met": met, "rows": rows}, seed=options.seed)
        if not options.json:
            show(rows[-1])
    return document


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", default=(), help="some of them, by name (default: all)")
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS))
    options = parser.parse_args()
    document = asyncio.run(everything(options))
    if options.json:
        print(json.dumps(document))
    return 0 if document["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
