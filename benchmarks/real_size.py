"""GPT-2 (124 million parameters) trained from nothing by four volunteers, beside one process of plain torch.

The model is transformers' with random weights, its byte-level BPE of 50,257 tokens is trained on the
sources and documents of the installed packages, which are also what it learns. `hetpeer init --model hf:…`
makes the run. Four volunteers of one thread each train it on this machine; one is killed, and comes back
seconds later. One process with two threads trains the same microbatches in the same order, by torch's own
AdamW: the first half of its steps before the swarm and the second half after it, so that both meet the
machine's moods alike.

Compared are the seconds of a step, the losses of all steps and the held-out losses. Every two seconds the
proportional set size of every process of every volunteer is read, and compared with `--ram-limit`. `--trace`
also says how long each volunteer's worker was busy with what.

With `--swarm-only` no process trains alone: one of 1.3 billion parameters does not fit on this machine, and
four volunteers that keep what updates need on the disk do.

With `--moves` the coordinator may move blocks. What each move promised is shown with what came of it.

    python -m benchmarks.real_size
    python -m benchmarks.real_size --steps 3 --trace
    python -m benchmarks.real_size --swarm-only --steps 20 --kill-at 0 --moves
    python -m benchmarks.real_size --swarm-only --layers 24 --width 2048 --heads 16 --context 512 --steps 3 \\
        --batch-size 2 --kill-at 0 --checkpoint-every 3 --recompute --offload disk --ram-limit 5.5GiB
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.byte_pairs import byte_level_bpe, package_texts
from benchmarks.finetune import evaluations, hetpeer
from benchmarks.proportional_memory import MemoryWatch
from benchmarks.swarm import Site, Swarm, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.training_curve import curve_points
from hetpeer.peer.limits.amounts import share_or_bytes
from hetpeer.peer.process.hetpeer_children import Child, end_all
from hetpeer.peer.process.span_trace import SUFFIX

THREADS = 2
"""Threads of the process that trains alone."""
END = "<|endoftext|>"
PROMISED = 0.15
"""Goal: relative difference of a step after a move from what was promised."""
BY_STEP, IN_ALL, NEAR = 0.9, 0.85, 1e-5
"""Goals: our speed compared with one process, by the middle step and in all; relative difference of the
held-out losses.
"""
SIZES = ("layers", "width", "heads", "context", "vocabulary", "steps", "batch_size", "volunteers", "kill_at")
"""Options that are kept for the figures to be those of the whole benchmark."""
LARGE = 1_000_000_000
"""Parameters from which a result is that of the large model."""
MIB = 2**20


def make_model(folder: Path, texts: list[str], options: Any) -> None:
    """A folder as `save_pretrained` leaves it: GPT-2 with random weights, without dropout, and its BPE."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    trained = byte_level_bpe(texts, options.vocabulary, (END,))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(options.seed)
    config = GPT2Config(
        vocab_size=options.vocabulary,
        n_positions=options.context,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


def make_run(folder: Path, options: Any) -> RunDirectory:
    """Model, texts and run below `folder`."""
    texts = list(package_texts(int(options.text_mib * MIB)))
    make_model(folder / "model", texts, options)
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {
        "steps": options.steps,
        "batch-size": options.batch_size,
        "microbatch-size": options.microbatch_size,
        "sequence-length": options.context,
        "learning-rate": 6e-4,
        "schedule": "cosine",
        # AdamW's first updates divide small gradients by themselves, and with them their rounding errors.
        "warmup-steps": options.steps // 5,
        "eval-every": options.steps,
        "eval-samples": options.eval_samples,
        "checkpoint-every": options.checkpoint_every,
        "stages": options.stages,
        "seed": options.seed,
        # Reading goes on until the steps have their samples; the rest of the texts is the tokenizer's alone.
        "max-samples": 2 * options.steps * options.batch_size + 2 * options.eval_samples,
    }
    where, what = folder / "run", (f"--model=hf:{folder / 'model'}", f"--data={data}", "--packed")
    flags = ["--unchecked", *(["--recompute"] if options.recompute else [])]
    hetpeer("init", str(where), *what, *flags, *(f"--{key}={value}" for key, value in settings.items()))
    return RunDirectory.open(where)


class OneProcess:
    """benchmarks/alone.py, which holds still after the first half of its steps."""

    def __init__(self, child: Child, steps: int, within_s: float) -> None:
        self._child = child
        self._steps = steps
        self._within_s = within_s
        self.step_s: list[float] = []
        self.losses: list[float] = []

    @classmethod
    async def start(cls, run: RunDirectory, folder: Path, within_s: float) -> OneProcess:
        steps = run.manifest.training.steps
        command = (sys.executable, "-P", "-m", "benchmarks.alone")
        arguments = (str(run.path), f"--threads={THREADS}", f"--stop-after={steps // 2}", "--held-out")
        log = folder / "alone.log"
        child = await Child.start("one process", arguments, home=folder, log=log, command=command)
        return cls(child, steps, within_s)

    async def first_half(self) -> None:
        """Return when it holds still."""
        await self._until(self._steps // 2)

    async def second_half(self) -> float:
        """The held-out loss at the end."""
        os.kill(self._child.pid, signal.SIGCONT)
        await self._until(self._steps)
        return (await self._said())["held_out"]

    async def _until(self, steps: int) -> None:
        while len(self.step_s) < steps:
            said = await self._said()
            self.step_s.append(said["seconds"])
            self.losses.append(said["loss"])

    async def _said(self) -> dict[str, float]:
        said: dict[str, float] = json.loads(await self._child.next_line(self._within_s))
        return said

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGCONT)
        await end_all([self._child])


async def train(run: RunDirectory, folder: Path, options: Any) -> dict[str, Any]:
    """Steps and memory of the swarm, from its first step to its last."""
    more = ["--threads=1", f"--ram-limit={options.ram_limit}", f"--offload={options.offload}"]
    more += ["--trace"] if options.trace else []
    site = Site(keep_places=not options.moves)
    async with running(run, folder, options.volunteers, *more, site=site) as swarm:
        memory = MemoryWatch(swarm)
        watching = asyncio.create_task(memory.watch())
        try:
            if 0 < options.kill_at < options.steps:
                await swarm.until(options.kill_at, options.within_s)
                swarm.at_liberty.add(options.killed)
                await swarm.kill(options.killed)
                await asyncio.sleep(options.absent)
                await swarm.start(options.killed)
            await swarm.until(options.steps, options.within_s)
            minded = [number for number in swarm.volunteers if number not in swarm.at_liberty]
            await swarm.finished(minded, options.within_s)
        finally:
            watching.cancel()
        swarm.feed.poll()
        limit = share_or_bytes(options.ram_limit) / MIB
        volunteers = {number: one.figures() for number, one in memory.volunteers.items()}
        return steps_of(swarm) | {
            "moves": [move.model_dump() for move in swarm.feed.history.moves],
            "memory": volunteers,
            "ram_limit_mib": limit,
            "ram_limit_kept": all(one["all_mib"] <= limit for one in volunteers.values()),
            "busy_s_per_step": {n: busy(swarm.home(n), options.steps) for n in volunteers},
        }


def steps_of(swarm: Swarm) -> dict[str, Any]:
    """Seconds from commit to commit, and from the first step's begin to the last commit."""
    commits = [one for one in swarm.feed.seen if one.record["kind"] == "commit"]
    first = commits[0].record["seconds"]
    between = [later.at - earlier.at for earlier, later in itertools.pairwise(commits)]
    return {
        "step_s": [round(seconds, 3) for seconds in (first, *between)],
        "reduce_s": [round(one.record["reduce_seconds"], 3) for one in commits],
        "all_s": first + sum(between),
        "rollbacks": swarm.feed.history.rollbacks,
    }


def busy(home: Path, steps: int) -> dict[str, float]:
    """Seconds a step by lane and kind of span, of the traces of one volunteer; none without `--trace`."""
    found: Counter[str] = Counter()
    for path in home.rglob(f"*{SUFFIX}"):
        _, *lines = path.read_text().splitlines()
        for span in map(json.loads, lines):
            if span["lane"] != "step" and "lane " not in span["lane"]:
                found[f"{span['lane']}: {span['name'].split()[0]}"] += span["to"] - span["from"]
    return {what: round(seconds / steps, 3) for what, seconds in found.most_common()}


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    """Half of the one process's steps, the swarm, the other half."""
    run = make_run(folder, options)
    if options.swarm_only:
        swarm = await train(run, folder, options)
        return outcome(run, options, swarm, {})
    alone = await OneProcess.start(run, folder, options.within_s)
    try:
        await alone.first_half()
        swarm = await train(run, folder, options)
        held_out = await alone.second_half()
    finally:
        await alone.end()
    return outcome(run, options, swarm, compared(run, swarm, alone, held_out))


def compared(run: RunDirectory, swarm: dict[str, Any], alone: OneProcess, held_out: float) -> dict[str, Any]:
    """The swarm beside the one process: speed, the losses of all steps, and the held-out losses."""
    middle = statistics.median(alone.step_s)
    ours = evaluations(run)[len(alone.step_s)]
    apart = [abs(one / other - 1) for one, other in zip(step_losses(run), alone.losses, strict=True)]
    return {
        "one_process": {
            "threads": THREADS,
            "step_s": [round(seconds, 3) for seconds in alone.step_s],
            "median_s": middle,
            "held_out": held_out,
        },
        "speed": {
            "by_step": round(middle / statistics.median(swarm["step_s"]), 3),
            "in_all": round(sum(alone.step_s) / swarm["all_s"], 3),
        },
        "step_losses_apart": [float(f"{one:.2g}") for one in apart],
        "difference": abs(ours - held_out) / held_out,
    }


def step_losses(run: RunDirectory) -> list[float]:
    """The loss of each step that counts, from the first."""
    points = curve_points(run.manifest, list(read_log(run.log_path)))
    return [point["loss"] for point in points if point["kind"] == "step"]


def outcome(run: RunDirectory, options: Any, swarm: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """All figures; `beside`: those of `compared`, or nothing."""
    verdict, loss = audit(run.path), evaluations(run)
    again = replay(run.path) if options.replay else None
    goals = {
        "every microbatch once": verdict.ok and verdict.steps == options.steps,
        "memory within --ram-limit": swarm["ram_limit_kept"],
    }
    if options.moves:
        goals["no move that takes more than it brings, steps after it as promised"] = all(
            move["promise"]["before_s"] is None or earned(move, options.steps) for move in swarm["moves"]
        )
    if beside:
        goals |= {
            f"speed by step at least {BY_STEP} of one process": beside["speed"]["by_step"] >= BY_STEP,
            f"speed in all at least {IN_ALL}": beside["speed"]["in_all"] >= IN_ALL,
            "held-out loss as one process's": beside["difference"] <= NEAR,
        }
    if again is not None:
        goals["computed again, bit for bit"] = again.equal == options.steps and not again.problems
    own = {
        "median_s": statistics.median(swarm["step_s"]),
        "held_out": loss[options.steps],
        "held_out_at_first": loss[0],
    }
    return {
        "parameters": run.manifest.parameters,
        "blocks": len(run.manifest.blocks),
        "layout": run.manifest.layouts[0],
        "tokens_per_step": options.batch_size * options.context,
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "swarm": swarm | own,
        **beside,
        "audit": {"ok": verdict.ok, "steps": verdict.steps, "problems": verdict.problems[:3]},
        "goals": goals,
        "met": all(goals.values()),
    }


def earned(move: dict[str, Any], steps: int) -> bool:
    """Whether a move of a running swarm brought more than it took, and what it had promised."""
    promise, result = move["promise"], move["result"]
    if result is None or result["after_s"] is None:
        return False
    brought = (promise["before_s"] - result["after_s"]) * (steps - move["step"])
    return brought > result["moving_s"] and abs(result["after_s"] / promise["after_s"] - 1) <= PROMISED


def told_steps(steps: int) -> list[int]:
    """The second step, whose loss is the first after an update, and every fifth of the run's steps."""
    return [2, *range(max(steps // 5, 3), steps + 1, max(steps // 5, 1))]


def show(figures: dict[str, Any]) -> None:
    swarm = figures["swarm"]
    print(
        f"{figures['parameters']:,} parameters in {figures['blocks']} blocks, {figures['tokens_per_step']} "
        f"tokens a step: {swarm['median_s']:.2f} s by the swarm; held-out loss "
        f"{swarm['held_out_at_first']:.4f} → {swarm['held_out']:.6f}; {swarm['rollbacks']} roll-backs"
    )
    if "one_process" in figures:
        alone, speed = figures["one_process"], figures["speed"]
        print(
            f"one process: {alone['median_s']:.2f} s ({speed['by_step']:.2f} by step, {speed['in_all']:.2f} "
            f"in all), held-out loss {alone['held_out']:.6f} ({figures['difference']:.1e})"
        )
        apart = figures["step_losses_apart"]
        told = ", ".join(f"{apart[step - 1]:.1e} in step {step}" for step in told_steps(len(apart)))
        print(f"losses of steps, relative difference: {told}")
    for move in swarm["moves"]:
        promise, result = move["promise"], move["result"] or {}
        print(
            f"{promise['blocks']} blocks moved before step {move['step']}: a step of {promise['before_s']} s "
            f"was to take {promise['after_s']:.1f} s, took {result.get('after_s')} s; the move "
            f"{promise['moving_s']:.0f} s, took {result.get('moving_s')} s {result.get('why', '')}"
        )
    for number, memory in swarm["memory"].items():
        parts = ", ".join(f"{kind} {mib:.0f}" for kind, mib in memory["largest_mib"].items())
        print(f"volunteer {number}: {memory['all_mib']:.0f} MiB at most (each at most: {parts})")
        for what, seconds in swarm["busy_s_per_step"][number].items():
            print(f"    {what}: {seconds:.2f} s a step")
    report.show_goals(figures["goals"])


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("layers", 12, "of the model"),
        ("width", 768, "of the model"),
        ("heads", 12, "of the model"),
        ("context", 256, "tokens of a sample"),
        ("vocabulary", 50_257, "tokens"),
        ("steps", 150, ""),
        ("batch-size", 8, "samples of a step"),
        ("microbatch-size", 1, "samples"),
        ("eval-samples", 8, "held-out samples"),
        ("checkpoint-every", 20, "steps"),
        ("stages", 4, "blocks are divided into"),
        ("volunteers", 4, ""),
        ("killed", 2, "volunteer that is killed"),
        ("kill-at", 64, "step after which it is; 0: nobody is killed"),
        ("absent", 10, "seconds until it comes back"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--text-mib", type=float, default=32.0, help="texts for the BPE (default: 32)")
    parser.add_argument("--ram-limit", default="4GiB", help="of each volunteer (default: 4GiB)")
    parser.add_argument("--offload", default="auto", help="of each volunteer (default: auto)")
    parser.add_argument("--recompute", action="store_true", help="as of `init`")
    parser.add_argument("--swarm-only", action="store_true", help="no process trains alone")
    parser.add_argument("--moves", action="store_true", help="the coordinator may move blocks")
    parser.add_argument("--within-s", type=float, default=7200.0, help="longest time of a part of the run")
    parser.add_argument("--replay", action="store_true", help="compute all again and compare: as long again")
    parser.add_argument("--trace", action="store_true", help="say how long workers were busy with what")
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    with tempfile.TemporaryDirectory(prefix="hetpeer-real-size-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    whole = all(getattr(options, name) == getattr(parsed(()), name) for name in SIZES)
    large = options.swarm_only and figures["parameters"] >= LARGE
    size = "large" if large else "" if whole else "some"
    name = "-".join(filter(None, ("real-size", "moves" if options.moves else size)))
    return report.finish(name, figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
