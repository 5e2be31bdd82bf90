"""Bytes of a token across the borders of a pipeline, and what a model learns with them.

A GPT in four stages on the texts of the installed packages (byte-level BPE), in one process that computes
what a swarm computes: each border writes and reads activations and gradients with the product's own codecs,
and evaluations travel as they are. All ways see the same tokens in the same order. The default sizes are
those of the goal; the options of a smaller study are in its result.

    python -m benchmarks.thin --width 192 --layers 4 --steps 600
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.byte_pairs import byte_level_bpe, package_texts
from benchmarks.thin_ways import FLOAT_BYTES, Wire, way
from hetpeer.examples.gpt import GPT

STAGES, HELD_OUT = 4, 128
GOALS = ((32.0, 0.01), (100.0, 0.03))
"""Times fewer bytes, and what the held-out loss may be higher by."""
CASES: tuple[tuple[str, int, str], ...] = (
    ("as it is", 1, "none"),
    ("bottleneck", 16, "int8"),
    ("bottleneck without tokens", 16, "int8"),
    ("constrained", 16, "int8"),
    ("tracked", 16, "int8"),
    ("bottleneck", 32, "int8"),
    ("tokens alone", 1, "none"),
    ("bottleneck", 8, "int8"),
    ("bottleneck", 16, "int4"),
    ("as it is", 1, "int4"),
)
"""Way, width over rank, codec."""


def corpus(options: argparse.Namespace) -> Tensor:
    """Token ids of the packages' texts, one after the other."""
    texts = list(package_texts(options.megabytes << 20))
    trained = byte_level_bpe(texts[: len(texts) // 2], options.vocabulary, [])
    encoded = [np.array(one.ids, dtype=np.int64) for one in trained.encode_batch(texts)]
    return torch.from_numpy(np.concatenate(encoded))


def rate(options: argparse.Namespace, step: int) -> float:
    """Learning rate: warm-up, then a cosine to a tenth."""
    warm = min(1.0, (step + 1) / options.warmup)
    return options.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / options.steps))


def train(case: tuple[str, int, str], data: Tensor, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: held-out loss after the same tokens, and bytes of a token across a border."""
    name, less, codec = case
    torch.manual_seed(seed)
    model = GPT(options.width, options.layers, options.heads, options.context, options.vocabulary)
    ends = [options.layers * stage // STAGES - 1 for stage in range(1, STAGES)]
    wire = Wire(codec)
    trained = way(name, model, ends, wire, options.width // less, seed)
    optimizer = torch.optim.AdamW(trained.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    draw, border = torch.Generator().manual_seed(seed), len(data) * 9 // 10

    def samples(low: int, high: int, count: int) -> tuple[Tensor, Tensor]:
        begins = torch.randint(low, high - options.context - 1, (count,), generator=draw)
        drawn = torch.stack([data[begin : begin + options.context + 1] for begin in begins])
        return drawn[:, :-1], drawn[:, 1:]

    held_out = samples(border, len(data), HELD_OUT)

    def evaluated() -> float:
        wire.open = False
        with torch.no_grad():
            parts = zip(*(tensor.split(16) for tensor in held_out), strict=True)
            found = statistics.fmean(float(trained(*part)) for part in parts)
        wire.open = True
        return found

    began, curve = time.monotonic(), {}
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(options, step)
        optimizer.zero_grad()
        trained(*samples(0, border, options.batch)).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            curve[step + 1] = evaluated()
    tokens = options.steps * options.batch * options.context
    each = wire.nbytes / tokens / (STAGES - 1)
    return {
        "way": name,
        "width_over_rank": less,
        "codec": codec,
        "seed": seed,
        "loss": curve[options.steps],
        "curve": curve,
        "bytes_a_token": each,
        "fewer": 2 * FLOAT_BYTES * options.width / each,
        "parameters": sum(one.numel() for one in trained.parameters()),
        "seconds": round(time.monotonic() - began),
    }


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, each against `as it is`, and the goals."""
    by_case: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["way"], row["width_over_rank"], row["codec"]), []).append(row)
    losses = {case: statistics.fmean(row["loss"] for row in own) for case, own in by_case.items()}
    plain = losses[CASES[0]]
    table = [
        {
            "way": case[0],
            "width_over_rank": case[1],
            "codec": case[2],
            "fewer": own[0]["fewer"],
            "loss": losses[case],
            "worse": losses[case] / plain - 1,
            "parameters": own[0]["parameters"],
        }
        for case, own in by_case.items()
    ]
    met = {
        f"≥ {fewer:g} times fewer bytes at ≤ +{worse:.0%}": any(
            row["way"] == "bottleneck" and row["fewer"] >= fewer and row["worse"] <= worse for row in table
        )
        for fewer, worse in GOALS
    }
    return {"table": table, "goals": met}


def show(figures: dict[str, Any]) -> None:
    for row in figures["table"]:
        of = f"{row['way']} 1/{row['width_over_rank']} {row['codec']}"
        print(
            f"{of:40} {row['fewer']:7.1f} times fewer  loss {row['loss']:.4f} ({row['worse']:+.2%})  "
            f"{row['parameters'] / 1e6:.2f} M parameters"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value in (
        ("width", 384),
        ("layers", 8),
        ("heads", 6),
        ("context", 128),
        ("vocabulary", 2048),
        ("batch", 16),
        ("steps", 1000),
        ("warmup", 30),
        ("every", 100),
        ("megabytes", 24),
        ("seeds", 1),
        ("jobs", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--only", action="append", help="cases with this in their name, as 'bottleneck 16 int8'; repeatable"
    )
    options = parser.parse_args()
    data = corpus(options)
    asked = options.only or [""]
    named = {case: " ".join(map(str, case)) for case in CASES}
    wanted = [case for case in CASES if case == CASES[0] or any(one in named[case] for one in asked)]
    seeds = range(options.seed, options.seed + options.seeds)
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        runs = [pool.submit(train, case, data, seed, options) for case in wanted for seed in seeds]
        for run in as_completed(runs):
            row = run.result()
            print(json.dumps(row), file=sys.stderr, flush=True)
    rows = [run.result() for run in runs]
    figures = {"options": vars(options), "tokens": len(data), "rows": rows, **judged(rows)}
    figures["met"] = all(figures["goals"].values())
    return report.finish(f"thin-{options.width}-{options.steps}", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
