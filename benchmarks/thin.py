"""Bytes of a token across the borders of a pipeline, and what a model learns with them.

A GPT in four stages on the texts of the installed packages (byte-level BPE), in one process that computes
what a swarm computes: each border writes and reads activations and gradients with the product's own codecs,
and evaluations travel as they are. All ways see the same tokens in the same order. The default sizes are
those of the goal; the options of a smaller study are in its result. `--only images` is the same for image
models (thin_images.py).

With `--keep FOLDER` it goes on where it was cut, and `--within 0` tells what is there.

    python -m benchmarks.thin --width 192 --layers 4 --steps 600
    python -m benchmarks.thin --only images
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import report, thin_images
from benchmarks.byte_pairs import byte_level_bpe, package_texts
from benchmarks.kept_rows import Row, add_keeping, commits, measured_rows
from benchmarks.thin_ways import FLOAT_BYTES, Wire, way
from hetpeer.examples.gpt import GPT

STAGES, HELD_OUT = 4, 128
SIZES = {
    "width": 384,
    "layers": 6,
    "heads": 6,
    "context": 64,
    "vocabulary": 1024,
    "batch": 4,
    "steps": 1000,
    "warmup": 30,
    "every": 250,
    "megabytes": 8,
}
"""Default sizes: those of the goal."""
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
    optimizer = torch.optim.AdamW(trained.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
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


def judged(rows: list[Row]) -> dict[str, Any]:
    """Means over seeds, each against `as it is` with the same seeds, and the goals."""
    by_case: dict[tuple[str, int, str], dict[int, Row]] = {}
    for row in rows:
        by_case.setdefault((row["way"], row["width_over_rank"], row["codec"]), {})[row["seed"]] = row
    plain = by_case.get(CASES[0], {})
    table = []
    for case, own in by_case.items():
        both = [seed for seed in own if seed in plain]
        if not both:
            continue
        first = next(iter(own.values()))
        table.append(
            {
                "way": case[0],
                "width_over_rank": case[1],
                "codec": case[2],
                "fewer": first["fewer"],
                "loss": statistics.fmean(own[seed]["loss"] for seed in both),
                "worse": statistics.fmean(own[seed]["loss"] / plain[seed]["loss"] - 1 for seed in both),
                "parameters": first["parameters"],
                "seeds": len(both),
            }
        )
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
            f"{of:40} {row['fewer']:7.1f} times fewer  loss {row['loss']:.4f} ({row['worse']:+.2%}, "
            f"{row['seeds']} seeds)  {row['parameters'] / 1e6:.2f} M parameters"
        )
    report.show_goals(figures["goals"])


def text_study(options: argparse.Namespace, only: Sequence[str]) -> int:
    """All ways of a GPT, seed after seed."""
    data = corpus(options)
    named = {case: " ".join(map(str, case)) for case in CASES}
    wanted = [case for case in CASES if case == CASES[0] or any(one in named[case] for one in only)]
    sizes = {name: getattr(options, name) for name in (*SIZES, "learning_rate")} | {"tokens": len(data)}
    rows = measured_rows(
        options,
        [
            (sizes | {"case": case, "seed": seed}, train, (case, data, seed, options))
            for seed in range(options.seed, options.seed + options.seeds)
            for case in wanted
        ],
    )
    figures = {"options": _words(options), "tokens": len(data), "commits": commits(rows), "rows": rows}
    figures |= judged(rows)
    figures["met"] = all(figures["goals"].values())
    return report.finish(f"thin-{options.width}-{options.steps}", figures, options, show)


def image_study(options: argparse.Namespace) -> int:
    """All ways of both image models, seed after seed."""
    rows = measured_rows(
        options,
        [
            (
                {"case": case, "seed": seed, "times": options.times},
                thin_images.train,
                (case, seed, options.times),
            )
            for seed in range(options.seed, options.seed + options.seeds)
            for case in thin_images.CASES
        ],
    )
    figures = {"options": _words(options), "commits": commits(rows), "rows": rows}
    figures |= thin_images.judged(rows)
    figures["met"] = all(figures["goals"].values())
    return report.finish("thin-images", figures, options, thin_images.show)


def _words(options: argparse.Namespace) -> dict[str, Any]:
    """The options that say what was measured."""
    return {name: value for name, value in vars(options).items() if name not in ("keep", "within", "json")}


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3, help="(default: 3)")
    parser.add_argument(
        "--times", type=int, default=0, help="how often an image is seen (default: as needed)"
    )
    parser.add_argument(
        "--only",
        action="append",
        help="images, or ways with this in their name, as 'bottleneck 16 int8'; repeatable",
    )
    add_keeping(parser)
    options = parser.parse_args()
    only = options.only or ["", "images"]
    ways = [one for one in only if one != "images"]
    ends = [text_study(options, ways)] if ways else []
    if "images" in only:
        ends.append(image_study(options))
    return max(ends)


if __name__ == "__main__":
    sys.exit(main())
