"""Ways to train a GPT with several machines: hetpeer, and what its user would take instead, as processes."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.swarm import Site, running
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.peer.process.hetpeer_children import Child, end_all
from tests.wanlab.lab import Lab

PEERS = 4
WITHIN_S, LOOK_S = 1800.0, 1.0
INTERFACE = "wan0"


@dataclass(slots=True)
class Trained:
    """Figures of one way."""

    step_s: list[float] = field(default_factory=list)
    train: dict[int, float] = field(default_factory=dict)
    """Version → mean training loss of the step that made it."""
    heldout: dict[int, float] = field(default_factory=dict)
    """Version → held-out loss."""

    def middle(self, settle: int) -> float:
        return statistics.median(self.step_s[settle:])


async def swarm(run: RunDirectory, folder: Path, lab: Lab) -> Trained:
    """hetpeer, to the end of the run."""
    async with running(run, folder, PEERS, site=Site(lab=lab)) as peers:
        await peers.finished(list(peers.volunteers), WITHIN_S)
        peers.feed.poll()
        commits = [seen.record for seen in peers.feed.seen if seen.record["kind"] == "commit"]
        return Trained(
            step_s=[commit["seconds"] for commit in commits],
            train={commit["step"] + 1: commit["loss"] for commit in commits},
            heldout=dict(peers.feed.history.evaluations),
        )


async def script(
    name: str, folder: Path, arguments: Sequence[str], at: Sequence[str] = (), number: int = 0
) -> Child:
    """Process `number` of a baseline; `at` starts it at a node."""
    command = (*at, sys.executable, "-P", "-m", f"benchmarks.baselines.{name}")
    log = folder / f"{name}-{number}.log"
    return await Child.start(name, arguments, home=folder, log=log, command=command)


async def told(children: Sequence[Child], steps: int) -> Trained:
    """Output of the last of `children`, once all are done.

    Raises `LocalError` HP-DEMO-003 when one fails.
    """
    listening = asyncio.ensure_future(_listen(children[-1], steps))
    while not listening.done():
        await asyncio.wait({listening}, timeout=LOOK_S)
        for child in children:
            if child.status:
                listening.cancel()
                raise child.failure()
    return listening.result()


async def _listen(child: Child, steps: int) -> Trained:
    """Until it has done `steps` steps and told the loss of the last one, if it tells any."""
    found, since, before = Trained(), 0.0, 0
    while steps not in found.train or (found.heldout and steps not in found.heldout):
        said = json.loads(await child.next_line(WITHIN_S))
        if "begun" in said:
            since = said["at"]
        elif "train" in said:
            # hivemind skips some versions: what they took is divided among them
            found.step_s.append((said["at"] - since) / (said["step"] - before))
            found.train[said["step"]] = said["train"]
            since, before = said["at"], said["step"]
        elif "loss" in said:
            found.heldout[said["step"]] = said["loss"]
        elif "over" in said:
            break
    return found


async def one_machine(run: RunDirectory, folder: Path, steps: int, every: int) -> Trained:
    child = await script("one_machine", folder, (str(run.path), str(steps), str(every)))
    try:
        return await told([child], steps)
    finally:
        await end_all([child])


async def torch_pipeline(run: RunDirectory, folder: Path, lab: Lab, steps: int) -> Trained:
    children = []
    try:
        for rank in range(PEERS):
            arguments = (str(run.path), str(steps), str(rank), str(PEERS), lab.address(1), INTERFACE)
            at = lab.at(rank + 1, ())
            children.append(await script("torch_pipeline", folder, arguments, at, rank))
        return await told(children, steps)
    finally:
        await end_all(children)


async def hivemind_optimizer(run: RunDirectory, folder: Path, lab: Lab, steps: int, every: int) -> Trained:
    children: list[Child] = []
    first: tuple[str, ...] = ()
    try:
        for peer in range(PEERS):
            address = lab.address(peer + 1)
            arguments = (str(run.path), str(steps), str(every), str(peer), str(PEERS), address, *first)
            at = lab.at(peer + 1, ())
            children.append(await script("hivemind_optimizer", folder, arguments, at, peer))
            if not peer:
                first = (await children[0].next_line(WITHIN_S),)
        return await told(children[::-1], steps)
    finally:
        family = psutil.Process().children(recursive=True)  # its DHT and p2pd outlive it
        await end_all(children)
        for process in family:
            if process.is_running() and "hivemind" in " ".join(process.cmdline()):
                process.kill()
