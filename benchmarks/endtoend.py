"""The same GPT, data and optimizer: hetpeer beside what its user would take instead, in several networks.

Four peers in the laboratory's homes, city and regions of the world, in homes with 5 Mbit/s up, and with a
gigabit (root): hetpeer as it is, with AdaTopK, and with bottlenecks; torch.distributed.pipelining (1F1B over
gloo), hivemind.Optimizer (each peer has the whole model), and one machine that needs no network. All
processes share this machine's cores. Tokens/s are of the middle step. Time to a loss counts steps until the
held-out loss is there; what torch's pipeline and hetpeer without a codec learn is what one machine learns
(their training losses are compared), so its curve counts for them.

    python -m benchmarks.endtoend
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.endtoend_ways import (
    PEERS,
    Trained,
    hivemind_optimizer,
    one_machine,
    swarm,
    torch_pipeline,
)
from benchmarks.networks import network
from benchmarks.swarm import NEVER, Model, make_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import LinkSettings, TrainingSettings
from tests.wanlab.lab import Lab

PLAIN, TOP_K, NARROW = "hetpeer", "hetpeer AdaTopK", "hetpeer bottleneck"
TORCH, HIVEMIND, ALONE = "torch pipeline", "hivemind", "one machine"
LINKS = {
    PLAIN: LinkSettings(),
    TOP_K: LinkSettings(codec="topk-int4", ratio=100.0),
    NARROW: LinkSettings(codec="int8"),
}
LESS = 16
"""Width of the model over the features of a token that cross a bottleneck."""
MIDDLE_OF = 5
"""Steps whose middle counts, at least, if there are as many."""
WAYS = (*LINKS, TORCH, HIVEMIND)
KNOWN = (PLAIN, TORCH)
"""Their curve is that of one machine."""
SAME = 1e-3
"""Ways that compute the same have training losses that differ by less than this, relative."""
FASTER = 3.0
"""Goal of AdaTopK against torch's pipeline, in homes, city and regions."""
OF_ALONE = 0.95
"""Goal in homes: of the tokens/s of one machine."""
SLOW, FAST = "slow", "gigabit"
NETWORKS = f"homes,city,regions,{SLOW},{FAST}"
SLOW_FASTER = {TOP_K: 4.0, TORCH: 20.0}
"""Goals of bottlenecks over slow lines: how much sooner they are at the loss than these."""
SLOW_FAST = 1.5
"""Goal: seconds of their step over slow lines, in those over fast ones."""


def made(folder: Path, options: Any, steps: int, way: str = PLAIN) -> RunDirectory:
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
    narrow = options.width // LESS if way == NARROW else None
    return make_run(folder, model, PEERS, training, options.seed, LINKS[way], bottleneck=narrow)


async def measure(where: str, alone: Trained, options: Any, folder: Path) -> dict[str, Trained]:
    """All ways in one network; those whose curve is known train a few steps only.

    One machine does so beside the others, as what this machine's cores do in a second changes while all this
    takes an hour.
    """
    steps, found = options.steps, {}
    run = made(folder / f"{where} others", options, steps)
    beside = await one_machine(run, folder, options.few, options.few)
    found[ALONE] = replace(alone, step_s=beside.step_s)
    for way in options.ways:
        place, few = folder / f"{where} {way}", options.few if way in KNOWN else steps
        with Lab(network(where)) as lab:
            if way in LINKS:
                found[way] = await swarm(made(place, options, few, way), place, lab)
            elif way == TORCH:
                found[way] = await torch_pipeline(run, folder, lab, few)
            else:
                found[way] = await hivemind_optimizer(run, folder, lab, steps, options.every)
    return found


def judge(where: str, found: dict[str, Trained], options: Any) -> dict[str, Any]:
    alone = found[ALONE]
    target = alone.heldout[options.steps - options.every]
    tokens = options.microbatches * options.microbatch_size * 128
    rows: dict[str, Any] = {}
    for name, one in found.items():
        if name in KNOWN:
            apart = max(abs(loss / alone.train[step] - 1) for step, loss in one.train.items())
            assert apart < SAME, f"{name} in {where} computes something else: {apart}"
        curve = alone.heldout if name in KNOWN else one.heldout
        there = next((step for step, loss in sorted(curve.items()) if step and loss <= target), None)
        settled = 0 if name == ALONE else min(options.settle, max(len(one.step_s) - MIDDLE_OF, 0))
        step_s = one.middle(settled)
        rows[name] = {
            "step_s": step_s,
            "tokens_per_second": tokens / step_s,
            "steps_to_loss": there,
            "seconds_to_loss": None if there is None else there * step_s,
            "steps": [round(seconds, 3) for seconds in one.step_s],
            "heldout": one.heldout,
        }
    several = [name for name in rows if name != ALONE]
    first = min(several, key=lambda name: rows[name]["step_s"])
    result = {"where": where, "target_loss": target, "rows": rows, "first": first}
    return result | {"goals": goals_of(where, rows, first)}


def goals_of(where: str, rows: dict[str, Any], first: str) -> dict[str, bool]:
    """Goals of one network, of the ways that were measured."""
    step_s = {name: row["step_s"] for name, row in rows.items()}
    met = {"hetpeer is the first of all that train on several machines": first in LINKS}
    if where not in (SLOW, FAST):
        if {PLAIN, TORCH} <= rows.keys():
            met["as it is no slower than torch"] = step_s[PLAIN] <= step_s[TORCH]
        if {TOP_K, TORCH} <= rows.keys():
            met[f"AdaTopK {FASTER:g} times as fast as torch"] = FASTER * step_s[TOP_K] <= step_s[TORCH]
    if where == "homes":
        met[f"{OF_ALONE:g} of one machine"] = step_s[ALONE] >= OF_ALONE * step_s[first]
    if where == SLOW and NARROW in rows:
        ours = rows[NARROW]["seconds_to_loss"]
        for name, faster in SLOW_FASTER.items():
            if name in rows:
                theirs = rows[name]["seconds_to_loss"]
                sooner = ours is not None and (theirs is None or faster * ours <= theirs)
                met[f"bottlenecks {faster:g} times as soon at the loss as {name}"] = sooner
    return met


def against_fast(results: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """The goal of bottlenecks over slow lines against fast ones, if both were measured."""
    step_s = {one["where"]: one["rows"][NARROW]["step_s"] for one in results if NARROW in one["rows"]}
    if not {SLOW, FAST} <= step_s.keys():
        return {}
    return {
        f"bottlenecks over slow lines within {SLOW_FAST:g} of fast ones": (
            step_s[SLOW] <= SLOW_FAST * step_s[FAST]
        )
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['where']}: held-out loss {result['target_loss']:.3f}")
    for name, row in sorted(result["rows"].items(), key=lambda one: one[1]["step_s"]):
        there = row["seconds_to_loss"]
        reached = f"{there:7.1f} s to it" if there else "not reached"
        print(
            f"  {name:18} {row['tokens_per_second']:8,.0f} tokens/s  {row['step_s']:7.2f} s a step  {reached}"
        )
    report.show_goals(result["goals"])


async def all_networks(options: Any) -> dict[str, Any]:
    """One after the other; what one has shown is not lost with the next."""
    whole = (options.networks, options.ways) == (NETWORKS, list(WAYS))
    name = "endtoend" if whole else "endtoend-some"
    results: list[dict[str, Any]] = []
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as path:
        folder = Path(path)
        run = made(folder / "alone", options, options.steps)
        alone = await one_machine(run, folder, options.steps, options.every)
        for where in options.networks.split(","):
            found = await measure(where, alone, options, folder)
            results.append(judge(where, found, options))
            goals = against_fast(results)
            met = all(all(result["goals"].values()) for result in results) and all(goals.values())
            figures = {"networks": results, "goals": goals, "met": met}
            document = report.keep(name, figures, seed=options.seed)
            with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
                show(results[-1])
                report.show_goals(goals)
    return document


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("width", 256, "of the model, of 4 layers"),
        ("microbatch-size", 8, "samples"),
        ("microbatches", 16, "of a step"),
        ("steps", 24, "of the ways whose curve is not known"),
        ("every", 4, "steps between evaluations"),
        ("few", 6, "steps of the others"),
        ("settle", 3, "steps that do not count for the time"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    document = asyncio.run(all_networks(options))
    if options.json:
        print(json.dumps(document))
    return 0 if document["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
