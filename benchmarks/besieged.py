"""A swarm on loopback under ten attackers at once: the coordinator's loop, goodput, disk and checkpoints.

A `hetpeer bootstrap` and four volunteers train a small GPT. Ten attackers (tests/hostile/ten_attackers.py)
come twice: ten that are never let in, and ten with sessions. Each attack is measured between two quiet
periods.

All processes share this machine's cores, so the attackers have a control group of `--cores` processors, and
in quiet periods a process that does nothing useful has a group of the same size. What is lost is then lost to
what attackers send, not to the processors they take. Each worker has a group of its own, so that computing
takes longest, as at home. Needs root (control groups); the network is loopback without limits.

Loop lag is that of the coordinator's loop (benchmarks/loop_lag.py), at moments 10 ms apart. A newcomer joins
at the end of each period, beside the attack: nobody honest is to be refused.

    python -m benchmarks.besieged
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.chaos import look
from benchmarks.goodput import Period, SlowWorkers, Watch, refused
from benchmarks.loop_lag import VARIABLE as LOOP_LAG
from benchmarks.loop_lag import lags_between
from benchmarks.swarm import START_S, Model, Site, Swarm, endless, make_run, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.demo.demo_report import collect_evidence
from hetpeer.peer.process.hetpeer_children import Child, end_all
from tests.hostile.attacks import WITH_HELLO, WITHOUT_HELLO, AttackSwitch
from tests.wanlab.processors import Processor

VOLUNTEERS, STAGES = 4, 2
WORKER = 0.08
"""Share of a processor that each worker has."""
MICROBATCHES, CHECKPOINT_EVERY = 12, 5
WARM_UP_STEPS, WARM_UP_S = 8, 300.0
SETTLE_S, JOIN_S = 8.0, 60.0
LAG_MS, GOODPUT, GROWTH = 100.0, 0.9, 1 << 20
"""Goals: lag at the 99th percentile, share of the quiet goodput, bytes more than in quiet periods."""
CHECKPOINT_S = 10.0
"""Seconds from the commit of a version to its checkpoint, at most."""
PROBED = (sys.executable, "-P", "-m", "benchmarks.loop_lag")
ATTACKERS = (sys.executable, "-P", "-m", "tests.hostile.ten_attackers")


@dataclass(frozen=True, slots=True)
class ProbedSite(Site):
    """Loopback, with a watch on the coordinator's loop."""

    def at(self, node: int) -> Sequence[str]:
        """Command that starts hetpeer at `node`."""
        return PROBED if node == 0 else self.command


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A period, and bytes of the run directory but for checkpoints that came in it."""

    name: str
    period: Period
    grown: int
    joined_s: float | None
    """Seconds until a newcomer contributed; None: it did not within JOIN_S."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts of what attackers sent in it."""


class Siege:
    """The swarm, its attackers, and the process that takes as much of the machine as they do."""

    def __init__(self, options: Any, swarm: Swarm, folder: Path, groups: ExitStack) -> None:
        self._options = options
        self._swarm = swarm
        self._folder = folder
        self._groups = groups
        self._switch = AttackSwitch(folder)
        self._attackers: Child | None = None
        self._idle: Child | None = None
        self._newcomers = 0

    async def begin(self) -> None:
        """Start the attackers and the other process, each in its group."""
        keys = self._folder / "attackers"
        keys.mkdir()
        where = (self._swarm.address, str(self._swarm.run.path), str(keys))
        log = self._folder / "attackers.log"
        self._attackers = await Child.start("attackers", where, home=keys, log=log, command=ATTACKERS)
        await self._attackers.next_line(START_S)
        spin = (sys.executable, "-c", "while True: pass")
        self._idle = await Child.start("load", (), home=keys, log=log, command=spin)
        for child in (self._attackers, self._idle):
            self._groups.enter_context(Processor(child.pid, self._options.cores))

    async def end(self) -> None:
        """End both."""
        await end_all(child for child in (self._attackers, self._idle) if child is not None)

    def pids(self) -> list[int]:
        """The process that attacks, or the one in its place."""
        here = (self._attackers, self._idle)
        return [child.pid for child in here if child is not None and child.status is None]

    def attack(self, name: str) -> None:
        """From now on `name` is under way; empty: the other process runs."""
        assert self._attackers is not None
        assert self._idle is not None
        if self._attackers.status is not None:
            raise self._attackers.failure()
        psutil.Process(self._idle.pid).send_signal(signal.SIGSTOP if name else signal.SIGCONT)
        self._switch.say(name)

    async def during(self, name: str, watch: Watch) -> Measured:
        """Figures of a period of `name`, and of a newcomer at its end."""
        self.attack(name)
        await watch.during(SETTLE_S)
        size, before = self._size(), self._counts()
        period = await watch.during(self._options.seconds if name else self._options.quiet)
        grown, counts = self._size() - size, self._counts()
        joined_s = await self._newcomer()
        self.attack("")
        return Measured(
            name=name,
            period=period,
            grown=grown,
            joined_s=joined_s,
            counts={kind: n - before.get(kind, 0) for kind, n in counts.items()} if name else {},
        )

    async def _newcomer(self) -> float | None:
        """A volunteer comes, contributes, and leaves in good order."""
        self._newcomers += 1
        name = f"newcomer-{self._newcomers}"
        log = self._folder / f"{name}.log"
        arguments = ("join", "--bootstrap", self._swarm.address, "--name", name, *Site().listening(1))
        began = time.monotonic()
        child = await Child.start(name, arguments, home=self._folder / name, log=log)
        joined_s = None
        while joined_s is None and time.monotonic() - began < JOIN_S:
            await look(self._swarm)
            if "you are contributing" in log.read_text(errors="replace"):
                joined_s = time.monotonic() - began
        await child.end(20.0)
        return joined_s

    def _counts(self) -> dict[str, int]:
        path = self._folder / "attackers" / "counts.json"
        with suppress(FileNotFoundError, ValueError):
            return dict(json.loads(path.read_text()))
        return {}

    def _size(self) -> int:
        """Bytes of the run directory but for checkpoints, of which old ones go."""
        run = self._swarm.run
        files = [path for path in run.path.rglob("*") if not path.is_relative_to(run.checkpoints)]
        return sum(path.stat().st_size for path in files if path.is_file())


async def trial(options: Any, folder: Path) -> dict[str, Any]:
    """Make a run in `folder`, put it through the two attacks, and look at what came of it."""
    training = endless(MICROBATCHES, CHECKPOINT_EVERY)
    run = make_run(folder, Model(width=96, sequence_length=64), STAGES, training, options.seed)
    lag = folder / "loop-lag.jsonl"
    os.environ[LOOP_LAG] = str(lag)
    async with running(run, folder, VOLUNTEERS, site=ProbedSite()) as swarm:
        await swarm.until(WARM_UP_STEPS, WARM_UP_S)
        with ExitStack() as groups, SlowWorkers(swarm, WORKER) as slow:
            siege = Siege(options, swarm, folder, groups)
            watch = Watch(swarm, VOLUNTEERS, MICROBATCHES, siege.pids, slow)
            try:
                await siege.begin()
                found = [await siege.during("", watch)]
                for attack in (WITHOUT_HELLO, WITH_HELLO):
                    found.append(await siege.during(attack.name, watch))
                    found.append(await siege.during("", watch))
            finally:
                await siege.end()
        honest = [Identity.load(swarm.home(n) / "identity.key").peer_id for n in range(1, VOLUNTEERS + 1)]
        rows = _rows(found, watch, swarm, lag)
        refusals = _refusals(folder, [*honest, Identity.load(run.path / "identity.key").peer_id])
        gone = [one.record for one in swarm.feed.seen if one.record["kind"] == "gone"]
        lost = [record["why"] for record in gone if record["peer"] in honest]
        await end_all([swarm.bootstrap])
        swarm.feed.poll()
    collect_evidence(run, map(swarm.home, range(1, VOLUNTEERS + 1)))
    verdict = audit(run.path)
    goals = {f"{row['attack']}: {goal}": met for row in rows for goal, met in row["goals"].items()}
    goals |= {"nobody honest refused or lost": not refusals and not lost, "exactly once": verdict.ok}
    return {
        "volunteers": VOLUNTEERS,
        "seconds": options.seconds,
        "quiet_seconds": options.quiet,
        "attackers_cores": options.cores,
        "beside_quiet_periods": f"a process that does nothing useful, on {options.cores} processors",
        "network": "loopback",
        "rows": rows,
        "honest_refused": refusals,
        "honest_lost": lost,
        "steps": swarm.feed.history.version,
        "audit_ok": verdict.ok,
        "audit_problems": verdict.problems[:10],
        "goals": goals,
        "met": all(goals.values()),
    }


def _rows(found: Sequence[Measured], watch: Watch, swarm: Swarm, lag: Path) -> list[dict[str, Any]]:
    """Figures of each attack, beside those of the quiet periods before and after it."""
    rows = []
    for before, one, after in zip(found[::2], found[1::2], found[2::2], strict=False):
        own, quiet = (
            _figures(one, watch, swarm, lag),
            [_figures(q, watch, swarm, lag) for q in (before, after)],
        )
        usual = statistics.mean(q["goodput"] for q in quiet)
        ratio = own["goodput"] / usual
        steps = own["steps"]
        usual_growth = statistics.mean(q["grown_bytes"] / max(q["steps"], 1) for q in quiet) * steps
        more = own["grown_bytes"] - usual_growth
        goals = {
            "loop lag": own["lag_p99_ms"] <= LAG_MS,
            "goodput": ratio >= GOODPUT,
            "disk": more <= GROWTH,
            "checkpoints": own["checkpoints"] == own["checkpoints_due"],
            "newcomer": one.joined_s is not None,
        }
        rows.append(
            {
                "attack": one.name,
                "ratio": round(ratio, 3),
                **own,
                "grown_more_bytes": round(more),
                "sent": one.counts,
                "quiet": quiet,
                "goals": goals,
            }
        )
    return rows


def _figures(one: Measured, watch: Watch, swarm: Swarm, lag: Path) -> dict[str, Any]:
    period = one.period
    lags = lags_between(lag, period.begin, period.end)
    due, there, latest = _checkpoints(swarm, period)
    return {
        "goodput": round(watch.goodput(period), 3),
        "steps": sum(
            s.record["kind"] == "commit" and period.begin <= s.at < period.end for s in swarm.feed.seen
        ),
        "cost": round(watch.cost(period), 3),
        "lag_p50_ms": lags[len(lags) // 2],
        "lag_p99_ms": lags[len(lags) * 99 // 100],
        "lag_max_ms": lags[-1],
        "grown_bytes": one.grown,
        "checkpoints": there,
        "checkpoints_due": due,
        "checkpoint_latest_s": round(latest, 2),
        "newcomer_s": None if one.joined_s is None else round(one.joined_s, 1),
        "attackers_cores": round(period.hostile_cores, 3),
    }


def _checkpoints(swarm: Swarm, period: Period) -> tuple[int, int, float]:
    """Checkpoints due of versions committed in `period`, those stored in time, and the longest delay in s."""
    commits = {s.record["step"] + 1: s.at for s in swarm.feed.seen if s.record["kind"] == "commit"}
    stored = {s.record["version"]: s.at for s in swarm.feed.seen if s.record["kind"] == "checkpoint"}
    due = {
        v: at for v, at in commits.items() if v % CHECKPOINT_EVERY == 0 and period.begin <= at < period.end
    }
    delays = [stored[version] - at for version, at in due.items() if version in stored]
    return len(due), sum(delay <= CHECKPOINT_S for delay in delays), max(delays, default=0.0)


def _refusals(folder: Path, honest: Sequence[str]) -> list[str]:
    """Honest peers that any process refused, by its log."""
    found = []
    for log in [*folder.glob("volunteer-*.log"), *folder.glob("newcomer-*.log"), folder / "bootstrap.log"]:
        found += [
            f"{end} by {log.stem}" for end in refused(log) if any(peer.endswith(end) for peer in honest)
        ]
    return found


def show(figures: dict[str, Any]) -> None:
    """Print each row on a line."""
    for row in figures["rows"]:
        print(
            f"  {row['attack']}: goodput {row['ratio']:.0%}, loop lag p99 {row['lag_p99_ms']:.0f} ms (quiet "
            f"{max(q['lag_p99_ms'] for q in row['quiet']):.0f}), max {row['lag_max_ms']:.0f} ms, "
            f"{row['grown_more_bytes'] / 1024:.0f} KiB more on disk, checkpoints {row['checkpoints']} of "
            f"{row['checkpoints_due']}, newcomer {row['newcomer_s']} s, sent {row['sent']}"
        )
    print(
        f"  honest refused: {figures['honest_refused'] or 'none'}, lost: {figures['honest_lost'] or 'none'}"
    )
    report.show_goals(figures["goals"])


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each attack (default: 90)")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds before and after (default: 60)")
    parser.add_argument("--cores", type=float, default=0.5, help="processors of all attackers (default: 0.5)")
    parser.add_argument("--keep", type=Path, help="leave logs in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-besieged-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        figures = asyncio.run(trial(options, folder))
    return report.finish("besieged", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
