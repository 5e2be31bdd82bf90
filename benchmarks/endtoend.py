"""The same GPT, data and optimizer: hetpeer beside what its user would take instead, in three networks.

Four peers in the laboratory's homes, city and regions of the world (root): hetpeer as it is and with AdaTopK,
torch.distributed.pipelining (1F1B over gloo), hivemind.Optimizer (each peer has the whole model), and one
machine that needs no network. All processes share this machine's cores. Tokens/s are of the middle step. Time
to a loss counts steps until the held-out loss is there; what torch's pipeline and hetpeer without a codec
learn is what one machine learns (their training losses are compared), so its curve counts for them.

    python -m benchmarks.endtoend
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.networks import network
from benchmarks.swarm import NEVER, Model, Site, make_run, running
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import LinkSettings, TrainingSettings
from hetpeer.peer.process.hetpeer_children import Child, end_all
from tests.wanlab.lab import Lab

PEERS = 4
WITHIN_S, LOOK_S = 1800.0, 1.0
LINKS = {"hetpeer": LinkSettings(), "hetpeer AdaTopK": LinkSettings(codec="topk-int4", ratio=100.0)}
SAME = 1e-3
"""Ways that compute the same have training losses that differ by less than this, relative."""
FASTER = 3.0
"""Goal of AdaTopK against torch's pipeline."""
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


def made(folder: Path, options: Any, steps: int, links: LinkSettings) -> RunDirectory:
    folder.mkdir()
    training = TrainingSettings(
        steps=steps,
        batch_size=options.microbatches * options.microbatch_size,
        microbatch_size=options.microbatch_size,
        learning_rate=1e-3,
        eval_every=options.every,
        eval_microbatches=4,
        checkpoint_every=NEVER,
    )
    model = Model(width=options.width, layers=PEERS, sequence_length=128)
    return make_run(folder, model, PEERS, training, options.seed, links)


async def measure(where: str, alone: Trained, options: Any, folder: Path) -> dict[str, Trained]:
    """All ways in one network; those whose curve is known train a few steps only.

    One machine does so beside the others, as what this machine's cores do in a second changes while all this
    takes an hour.
    """
    few, steps = options.few, options.steps
    found = {}
    for name, links in LINKS.items():
        place = folder / f"{where} {name}"
        run = made(place, options, few if name == "hetpeer" else steps, links)
        with Lab(network(where)) as lab:
            found[name] = await swarm(run, place, lab)
    run = made(folder / f"{where} others", options, steps, LinkSettings())
    beside = await one_machine(run, folder, few, few)
    found["one machine"] = replace(alone, step_s=beside.step_s)
    with Lab(network(where)) as lab:
        found["torch pipeline"] = await torch_pipeline(run, folder, lab, few)
    with Lab(network(where)) as lab:
        found["hivemind"] = await hivemind_optimizer(run, folder, lab, steps, options.every)
    return found


def judge(where: str, found: dict[str, Trained], options: Any) -> dict[str, Any]:
    alone = found["one machine"]
    target = alone.heldout[options.steps - options.every]
    tokens = options.microbatches * options.microbatch_size * 128
    rows: dict[str, Any] = {}
    for name, one in found.items():
        settle = 0 if name == "one machine" else options.settle
        same = name in ("hetpeer", "torch pipeline")
        if same:
            apart = max(abs(loss / alone.train[step] - 1) for step, loss in one.train.items())
            assert apart < SAME, f"{name} in {where} computes something else: {apart}"
        curve = alone.heldout if same else one.heldout
        there = next((step for step, loss in sorted(curve.items()) if step and loss <= target), None)
        step_s = one.middle(settle)
        rows[name] = {
            "step_s": step_s,
            "tokens_per_second": tokens / step_s,
            "steps_to_loss": there,
            "seconds_to_loss": None if there is None else there * step_s,
            "steps": [round(seconds, 3) for seconds in one.step_s],
            "heldout": one.heldout,
        }
    best = min(rows, key=lambda name: rows[name]["step_s"])
    torchs, plain, ours = (rows[n]["step_s"] for n in ("torch pipeline", "hetpeer", "hetpeer AdaTopK"))
    return {
        "where": where,
        "target_loss": target,
        "rows": rows,
        "first": best,
        "none_against_torch": torchs / plain,
        "adatopk_against_torch": torchs / ours,
        "met": best.startswith("hetpeer") and plain <= torchs and torchs / ours >= FASTER,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['where']}: held-out loss {result['target_loss']:.3f}")
    for name, row in sorted(result["rows"].items(), key=lambda one: one[1]["step_s"]):
        there = row["seconds_to_loss"]
        reached = f"{there:7.1f} s to it" if there else "not reached"
        print(
            f"  {name:16} {row['tokens_per_second']:8,.0f} tokens/s  {row['step_s']:7.2f} s a step  {reached}"
        )
    print(
        f"  against torch's pipeline: {result['none_against_torch']:.2f}x without a codec,"
        f" {result['adatopk_against_torch']:.2f}x with AdaTopK (goals 1 and {FASTER}, and first): "
        f"{'met' if result['met'] else 'MISSED'}",
        flush=True,
    )


async def all_networks(options: Any) -> dict[str, Any]:
    """One after the other; what one has shown is not lost with the next."""
    results: list[dict[str, Any]] = []
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as path:
        folder = Path(path)
        run = made(folder / "alone", options, options.steps, LinkSettings())
        alone = await one_machine(run, folder, options.steps, options.every)
        for where in options.networks.split(","):
            found = await measure(where, alone, options, folder)
            results.append(judge(where, found, options))
            met = all(result["met"] for result in results)
            document = report.keep("endtoend", {"met": met, "networks": results}, seed=options.seed)
            if not options.json:
                show(results[-1])
    return document


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("width", 256, "of the model, of 4 layers"),
        ("microbatch-size", 8, "samples"),
        ("microbatches", 16, "of a step"),
        ("steps", 24, "of the ways whose curve is not known"),
        ("every", 4, "steps between evaluations"),
        ("few", 8, "steps of the others"),
        ("settle", 3, "steps that do not count for the time"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--networks", default="homes,city,regions")
    options = parser.parse_args()
    document = asyncio.run(all_networks(options))
    if options.json:
        print(json.dumps(document))
    return 0 if document["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
