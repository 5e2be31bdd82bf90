"""How long a run stands still when its coordinator dies: three reliable peers, two volunteers, all on this
machine.

The coordinator is killed (SIGKILL) while they train, and started again once the next one has committed a
step. Time goes from the kill to the record with which the next reign begins, and to the first step that it
commits; the middle of several.

    python -m benchmarks.failover
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.swarm import ENDLESS, NEVER, POLL_S, Model
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.demo.demo_run import LogFeed
from hetpeer.peer.process.hetpeer_children import Child, end_all
from hetpeer.peer.process.home import Home

PEERS, VOLUNTEERS = 3, 2
START_S, GOAL_S = 120.0, 5.0


@dataclass(slots=True)
class Reliable:
    """One reliable peer: its place, its process and what it has of the log."""

    path: Path
    home: Path
    log: Path
    child: Child
    feed: LogFeed

    def leads(self) -> bool:
        """Whether it coordinates, by its last words about that."""
        said = self.log.read_text(errors="replace")
        return self.child.status is None and said.rfind(" volunteers") > said.rfind("this peer follows")


async def start(folder: Path, number: int, address: str = "") -> Reliable:
    path, home = folder / f"run-{number}", folder / f"reliable-{number}"
    log = folder / f"reliable-{number}.log"
    log.unlink(missing_ok=True)  # what it said in an earlier life is not said now
    port = address.split("/")[4] if address and not number else "0"
    peers = ("--peers", address) if number else ()
    arguments = ("bootstrap", str(path), "--host", "127.0.0.1", "--port", port, "--home", str(home), *peers)
    child = await Child.start(f"reliable {number}", arguments, home=home, log=log)
    return Reliable(path, home, log, child, LogFeed(path / "log" / "ledger.log", SystemClock()))


async def until(condition: Any) -> None:
    async with asyncio.timeout(START_S):
        while not condition():  # noqa: ASYNC110 - other processes write files
            await asyncio.sleep(POLL_S)


def made(folder: Path, seed: int) -> RunDirectory:
    training = TrainingSettings(
        steps=ENDLESS, batch_size=16, microbatch_size=2, eval_every=NEVER, checkpoint_every=20, slot_size=2
    )
    others = [Home(folder / f"reliable-{number}").reliable_identity().peer_id for number in range(1, PEERS)]
    return create_run(
        folder / "run-0",
        model=Model(width=64, sequence_length=32).write(folder / "model.py"),
        name="failover",
        seed=seed,
        sequence_length=32,
        stages=[2],
        training=training,
        reliable=others,
    )


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    made(folder, options.seed)
    peers = [await start(folder, 0)]
    children = [peers[0].child]
    try:
        address = (await peers[0].child.next_line(START_S)).split()[-1]
        for number in range(1, PEERS):
            peers.append(await start(folder, number, address))
            children.append(peers[-1].child)
        for number in range(VOLUNTEERS):
            home, log = folder / f"home-{number}", folder / f"volunteer-{number}.log"
            arguments = ("join", "--bootstrap", address, "--host", "127.0.0.1")
            children.append(await Child.start(f"volunteer {number}", arguments, home=home, log=log))
        deaths = [await death(peers, children, folder, address) for _ in range(options.rounds)]
    finally:
        await end_all(children)
    reigns, commits = zip(*deaths, strict=True)
    return {
        "reliable_peers": PEERS,
        "to_the_next_reign_s": [round(one, 2) for one in reigns],
        "to_the_next_commit_s": [round(one, 2) for one in commits],
        "median_reign_s": statistics.median(reigns),
        "median_commit_s": statistics.median(commits),
        "goal_s": GOAL_S,
        "met": max(reigns) <= GOAL_S,
    }


async def death(
    peers: list[Reliable], children: list[Child], folder: Path, address: str
) -> tuple[float, float]:
    """Seconds from a kill to the next reign and to its first commit."""
    await until(lambda: any(peer.leads() for peer in peers))
    number = next(n for n, peer in enumerate(peers) if peer.leads())
    rest = [peer for peer in peers if peer is not peers[number]]

    def seen(kind: str, since: float) -> float | None:
        for peer in rest:
            peer.feed.poll()
        return min(
            (s.at for p in rest for s in p.feed.seen if s.record["kind"] == kind and s.at > since),
            default=None,
        )

    clock = SystemClock()
    begun = clock.monotonic()
    await until(lambda: seen("commit", begun))
    await peers[number].child.kill()
    killed = clock.monotonic()
    await until(lambda: seen("reign", killed))
    reign = seen("reign", killed)
    assert reign is not None
    await until(lambda: seen("commit", reign))
    commit = seen("commit", reign)
    assert commit is not None
    peers[number] = again = await start(folder, number, address)
    children.append(again.child)
    await until(lambda: "this peer follows" in again.log.read_text())
    return reign - killed, commit - killed


def show(figures: dict[str, Any]) -> None:
    print(f"to the next reign: {figures['to_the_next_reign_s']} s, middle {figures['median_reign_s']:.1f} s")
    print(
        f"to its first commit: {figures['to_the_next_commit_s']} s, middle {figures['median_commit_s']:.1f} s"
    )
    print(f"goal: at most {GOAL_S:.0f} s to the next reign: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7, help="kills (default: 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as path:
        figures = asyncio.run(measure(options, Path(path)))
    return report.finish("failover", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
