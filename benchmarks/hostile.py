"""A swarm in the laboratory under attack: what it still gets done, what it costs its members, and whether
anybody honest is turned away for it.

Twelve volunteers in homes (root), four stages: nine are honest all the time; three are honest but for the
attack that is under way, and come anew, as somebody else, for each attack by volunteers. A stranger in a home
of its own does the rest (tests/hostile). One attack after the other goes on for so many seconds; before each
the honest nine have the swarm for themselves for a while, which is what it is measured by: the same swarm
without attackers. First three come who attack nothing: all processes share this machine's cores. So it is
said, too, how many of them the attackers took, which would have their own, and how much of the honest ones'
processor time a microbatch cost, beside what it costs without attackers.

Goodput: microbatches that are committed, in a second. The first time that somebody hoards costs two stall
time-outs, so hoarding is measured after 150 s of it. At the end the volunteers' signed logs are audited.

    make hostile
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.chaos import look
from benchmarks.goodput import SlowWorkers, Watch, refused
from benchmarks.swarm import START_S, Model, Site, Swarm, endless, make_run, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.demo.demo_report import collect_evidence
from hetpeer.peer.process.hetpeer_children import Child, end_all
from tests.hostile.attacks import ATTACKS, NOTHING, Attack, AttackSwitch
from tests.wanlab.chaos import homes
from tests.wanlab.lab import Lab

STAGES = 4
HONEST, HOSTILE = 9, 3
STRANGER = HONEST + HOSTILE + 1
"""The nodes of the laboratory: honest volunteers from 1 on, then the hostile ones, then the stranger."""
WORKER = 0.06
"""Share of a processor that each worker has."""
MICROBATCHES = 24
WARM_UP_STEPS, WARM_UP_S = 5, 300.0
JOIN_S, SETTLE_S = 90.0, 15.0
GOODPUT, RSS_MIB = 0.9, 256
HOSTILE_COMMAND = (sys.executable, "-P", "-m", "tests.hostile.behaviour")
STRANGER_COMMAND = (sys.executable, "-P", "-m", "tests.hostile.stranger")


class Hostile:
    """The processes of the attackers in `folder`."""

    def __init__(self, swarm: Swarm, folder: Path, site: Site, address: str) -> None:
        self._swarm = swarm
        self._folder = folder
        self._site = site
        self._address = address
        self.switch = AttackSwitch(folder)
        self._volunteers: list[Child] = []
        self.homes: list[Path] = []
        """Of all that there were."""
        self._stranger: Child | None = None

    def pids(self) -> list[int]:
        """Of all that are here."""
        here = [*self._volunteers, *([] if self._stranger is None else [self._stranger])]
        return [child.pid for child in here if child.status is None]

    def _at(self, node: int, command: Sequence[str]) -> Sequence[str]:
        return Site(command=command, lab=self._site.lab).at(node)

    async def arrive(self) -> None:
        """The stranger is there from now on."""
        where = (self._site.listening(STRANGER)[1], self._address, self._swarm.run.run_id, str(self._folder))
        self._stranger = await Child.start(
            "stranger",
            where,
            home=self._folder / "stranger",
            log=self._folder / "stranger.log",
            command=self._at(STRANGER, STRANGER_COMMAND),
        )
        await self._stranger.next_line(START_S)

    async def join(self, of: Attack) -> None:
        """Three volunteers come, who are nobody known, and begin to work."""
        self.switch.say("")
        logs = []
        for number in range(HOSTILE):
            node, name = HONEST + 1 + number, f"{of.name.replace(' ', '-')}-{number}"
            self.homes.append(self._folder / f"home-{name}")
            logs.append(self._folder / f"hostile-{name}.log")
            arguments = ("join", "--bootstrap", self._address, "--name", name, *self._site.listening(node))
            self._volunteers.append(
                await Child.start(
                    name,
                    arguments,
                    home=self.homes[-1],
                    log=logs[-1],
                    command=self._at(node, HOSTILE_COMMAND),
                )
            )
        began = time.monotonic()
        while time.monotonic() - began < JOIN_S:
            await look(self._swarm)
            if all("you are contributing" in log.read_text(errors="replace") for log in logs):
                return

    async def leave(self) -> None:
        """The volunteers among them are gone, without a word."""
        self.switch.say("")
        await asyncio.gather(*(child.kill() for child in self._volunteers if child.status is None))
        self._volunteers.clear()

    async def end(self) -> None:
        await self.leave()
        if self._stranger is not None:
            await end_all([self._stranger])


async def trial(options: Any, folder: Path) -> dict[str, Any]:
    """Make a run in `folder`, put it through the attacks, and look at what came of it. Needs root."""
    with Lab(homes(STRANGER)) as lab:
        return await _trial(options, lab, folder)


async def _trial(options: Any, lab: Lab, folder: Path) -> dict[str, Any]:
    training = endless(MICROBATCHES, checkpoint_every=10)
    links = LinkSettings(codec="topk-int8", ratio=8.0, adaptive=False)  # or there is nothing to be a bomb
    model = Model(width=96, sequence_length=64)
    run = make_run(folder, model, STAGES, training, options.seed, links=links)
    site = Site(lab=lab)
    async with running(run, folder, HONEST, site=site) as swarm:
        await swarm.until(WARM_UP_STEPS, WARM_UP_S)
        hostile = Hostile(swarm, folder, site, swarm.address)
        with SlowWorkers(swarm, WORKER) as slow:
            watch = Watch(swarm, HONEST, MICROBATCHES, hostile.pids, slow)
            try:
                found = await _attacked(options, hostile, watch)
            finally:
                await hostile.end()
        shown = await _shown(swarm)
        await end_all([swarm.bootstrap])  # before the volunteers: or their farewells would take the run back
        swarm.feed.poll()
    collect_evidence(run, [*map(swarm.home, range(1, HONEST + 1)), *hostile.homes])
    verdict = audit(run.path)
    grown = {node: (watch.most[node] - watch.before[node]) / 2**20 for node in watch.before}
    ratios = {one["attack"]: one["ratio"] for one in found if one["attack"] != NOTHING.name}
    total = statistics.mean(ratios.values()) if ratios else 0.0
    worst = min(ratios.values(), default=0.0)
    bans = _bans(swarm, folder)
    goals = {
        "goodput": total >= GOODPUT,
        "goodput of the worst attack": worst >= GOODPUT,
        "memory": max(grown.values()) <= RSS_MIB,
        "wrong commits": verdict.ok,
        "honest bans": not bans,
        "no markup": not any(mark in shown for mark in ("\x1b", "<script")),
        "nothing leaked": "GOT " not in (folder / "stranger.log").read_text(errors="replace"),
    }
    return {
        "honest": HONEST,
        "hostile": HOSTILE,
        "seconds": options.seconds,
        "attacks": found,
        "goodput": round(total, 3),
        "worst": round(worst, 3),
        "memory_grown_mib": {node: round(mib, 1) for node, mib in grown.items()},
        "honest_bans": bans,
        "honest_gone": _gone(swarm),
        "steps": swarm.feed.history.version,
        "audit": {"ok": verdict.ok, **asdict(verdict)},
        "goals": goals,
        "met": all(goals.values()),
    }


async def _attacked(options: Any, hostile: Hostile, watch: Watch) -> list[dict[str, Any]]:
    """Each attack, and the quiet before it."""
    await hostile.arrive()
    await watch.during(SETTLE_S)
    watch.before = watch.memory()
    quiet, attacked = [], []
    for attack in options.attacks:
        quiet.append(await watch.during(options.quiet))
        if attack.volunteers:
            await hostile.join(attack)
            await watch.during(SETTLE_S)
        hostile.switch.say(attack.name)
        lead = await watch.during(attack.lead_s)
        attacked.append((attack, lead, await watch.during(options.seconds)))
        await hostile.leave()
        await watch.during(SETTLE_S)
        print(
            f"{attack.name:14} {watch.goodput(attacked[-1][2]):6.2f}/s, {watch.goodput(quiet[-1]):6.2f}/s "
            "before it",
            file=sys.stderr,
            flush=True,
        )
    quiet.append(await watch.during(options.quiet))
    usual, cost = statistics.median(map(watch.goodput, quiet)), statistics.median(map(watch.cost, quiet))
    return [
        {
            "row": attack.row,
            "attack": attack.name,
            "goodput": round(watch.goodput(when), 2),
            "ratio": round(watch.goodput(when) / usual, 3),
            "ratio_at_first": round(watch.goodput(lead) / usual, 3),
            "quiet_before": round(watch.goodput(before), 2),
            "cost": round(watch.cost(when) / cost, 3),
            "hostile_cores": round(when.hostile_cores, 2),
        }
        for (attack, lead, when), before in zip(attacked, quiet, strict=False)
    ]


async def _shown(swarm: Swarm) -> str:
    """Words of `hetpeer status` about the swarm, while the stranger's advert is still there."""
    async with swarm.asking("status") as child:
        with suppress(LocalError):
            lines = [await child.next_line(60.0)]
            while True:
                lines.append(await child.next_line(60.0))
    return "\n".join(lines)


def _ends(swarm: Swarm) -> dict[str, int]:
    """End of the id → honest node."""
    nodes = {
        Identity.load(swarm.home(node) / "identity.key").peer_id[-6:]: node for node in range(1, HONEST + 1)
    }
    return nodes | {Identity.load(swarm.run.path / "identity.key").peer_id[-6:]: 0}


def _bans(swarm: Swarm, folder: Path) -> list[str]:
    """Honest peers that other honest peers refused."""
    ends, found = _ends(swarm), []
    for node in range(HONEST + 1):
        log = folder / (f"volunteer-{node}.log" if node else "bootstrap.log")
        found += [f"{ends[end]} by {node}" for end in refused(log) if end in ends]
    return found


def _gone(swarm: Swarm) -> list[str]:
    """Why honest volunteers had to come back, if some had to."""
    ends = _ends(swarm)
    gone = [one.record for one in swarm.feed.seen if one.record["kind"] == "gone"]
    return [f"{ends[record['peer'][-6:]]}: {record['why']}" for record in gone if record["peer"][-6:] in ends]


def show(figures: dict[str, Any]) -> None:
    for one in figures["attacks"]:
        print(
            f"  {one['row']:2} {one['attack']:14} {one['ratio']:6.0%} of the goodput without attackers,"
            f" {one['ratio_at_first']:6.0%} before that; {one['cost']:.2f} times the processor time for each "
            "microbatch,"
            f" {one['hostile_cores']:.2f} processors taken by attackers"
        )
    verdict = figures["audit"]
    print(f"  all together {figures['goodput']:.0%}, worst {figures['worst']:.0%}")
    print(f"  memory: {max(figures['memory_grown_mib'].values()):.0f} MiB more at most")
    print(
        f"  microbatches: {verdict['counted']} of {verdict['microbatches_expected']} counted exactly once,"
        f" {verdict['lost']} lost, {verdict['duplicated']} doubled"
    )
    print(
        f"  honest peers refused: {figures['honest_bans'] or 'none'}; gone: "
        f"{figures['honest_gone'] or 'none'}"
    )
    for problem in verdict["problems"][:10]:
        print(f"  problem: {problem}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each attack (default: 40)")
    parser.add_argument("--quiet", type=float, default=30.0, help="seconds before each (default: 30)")
    every = {attack.name: attack for attack in (NOTHING, *ATTACKS)}
    parser.add_argument("--attacks", nargs="+", choices=every, default=list(every), help="only these")
    parser.add_argument("--keep", type=Path, help="leave logs in this folder")
    options = parser.parse_args()
    options.attacks = [attack for name, attack in every.items() if name in options.attacks]
    with tempfile.TemporaryDirectory(prefix="hetpeer-hostile-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        figures = asyncio.run(trial(options, folder))
    everything = len(options.attacks) == len(every)
    return report.finish("hostile" if everything else "hostile-some", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
