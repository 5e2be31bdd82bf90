"""Bytes of an image across the borders of a pipeline, and how many digits the model then tells right.

A ResNet and a small vision transformer in four stages on scikit-learn's digits, in one process that computes
what a swarm computes (thin_ways.py). The product finds the places and makes the bottlenecks. Seed s leaves
out every third image, from the s-th on: three seeds evaluate each of the 1,797 images once.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from benchmarks import report
from benchmarks.thin_ways import FLOAT_BYTES, Wire
from hetpeer.bootstrap.authoring.bottlenecks import narrowed
from hetpeer.bootstrap.authoring.package_model import quietly
from hetpeer.bootstrap.run.run_directory import Bottlenecks
from hetpeer.examples.digits import data as digits
from hetpeer.examples.resnet import ResNet
from hetpeer.stages.operators.names import BOTTLENECK
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from hetpeer.stages.tracing.trace import trace

STAGES, FOLDS, BATCH, LEARNING_RATE, WARM_UP = 4, 3, 32, 2e-3, 30
FEWER, WORSE = 16.0, 0.005
"""Goal: times fewer bytes, and what the accuracy may be lower by."""


class VisionTransformer(nn.Module):
    """transformers' ViT, four layers, for images [B, 1, 8, 8]: 16 patches of 2 by 2, a class token."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.net = ViTForImageClassification(
            ViTConfig(
                image_size=8,
                patch_size=2,
                num_channels=1,
                hidden_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=128,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.1,
                num_labels=10,
            )
        )

    def forward(self, image: Tensor, label: Tensor | None = None) -> Tensor:
        logits: Tensor = self.net(image).logits
        return logits if label is None else nnf.cross_entropy(logits, label)


SUBJECTS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "ResNet": (lambda: ResNet(16, 4), 8),
    "ViT": (VisionTransformer, 16),
}
"""Name → the model, and how often it sees each image."""
CASES: tuple[tuple[str, int, str], ...] = tuple(
    (subject, rank, codec)
    for subject, ways in (
        ("ResNet", ((0, "none"), (4, "int8"), (4, "int4"))),
        ("ViT", ((0, "none"), (28, "int4"), (16, "int4"))),
    )
    for rank, codec in ways
)
"""Subject, features that cross (0: all of them), codec."""


def wired(
    make: Callable[[], nn.Module], rank: int, example: Mapping[str, Tensor], wire: Wire, seed: int
) -> tuple[nn.Module, Bottlenecks]:
    """A model with what crosses its borders sent over `wire`: all of it, or `rank` features of it.

    The bottlenecks are those of `hetpeer init --stages 4 --bottleneck RANK`.
    """
    torch.manual_seed(seed)
    model = make()
    thin = model if rank else copy.deepcopy(model)
    dag = trace(thin, example)
    layout = balanced_ranges(cut_blocks(dag, at_least=STAGES), STAGES)
    mode = ComputeMode()
    _, _, found = narrowed(
        thin, example, dag, [layout], rank or 1, mode, at_least=STAGES, seed=seed, tell=quietly
    )
    for place in found.places:
        layer = model.get_submodule(place.layer)
        if rank:
            getattr(layer, BOTTLENECK).up.register_forward_pre_hook(lambda _up, args: wire(args[0]))
        else:
            layer.register_forward_hook(lambda _layer, _args, x: wire(x))
    return model, found


def train(case: tuple[str, int, str], seed: int, times: int) -> dict[str, Any]:
    """One run: digits told right of the fold, and bytes of an image across all borders.

    `times`: how often each image is seen; 0: as often as the subject needs.
    """
    subject, rank, codec = case
    make, epochs = SUBJECTS[subject]
    samples = list(digits())
    images, labels = (
        torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in ("image", "label")
    )
    left_out = torch.arange(len(labels)) % FOLDS == seed % FOLDS
    rows = torch.nonzero(~left_out).flatten()
    first = next(batches(rows, seed))
    wire = Wire(codec)
    model, found = wired(make, rank, {"image": images[first], "label": labels[first]}, wire, seed)
    model.train()
    steps = (times or epochs) * (len(rows) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    began, losses = time.monotonic(), list[float]()
    for step, chosen in zip(range(steps), batches(rows, seed), strict=False):
        warm = min(1.0, (step + 1) / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss = model(images[chosen], labels[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    each = wire.nbytes / steps / BATCH
    right = correct(model, wire, images[left_out], labels[left_out])
    whole = sum(_elements(make, found)) * 2 * FLOAT_BYTES
    return {
        "subject": subject,
        "rank": rank,
        "codec": codec,
        "seed": seed,
        "right": right,
        "of": int(left_out.sum()),
        "last_losses": statistics.fmean(losses[-50:]),
        "bytes_an_image": each,
        "fewer": whole / each,
        "behind": [place.layer for place in found.places],
        "parameters": sum(one.numel() for one in model.parameters()),
        "steps": steps,
        "seconds": round(time.monotonic() - began),
    }


def batches(rows: Tensor, seed: int) -> Iterator[Tensor]:
    """Rows in batches, in a new order each time; without end."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        order = rows[torch.randperm(len(rows), generator=draw)]
        yield from order[: len(rows) // BATCH * BATCH].split(BATCH)


def correct(model: nn.Module, wire: Wire, images: Tensor, labels: Tensor) -> int:
    """Images told right; evaluations travel as they are."""
    wire.open = False
    model.eval()
    with torch.no_grad():
        return int((model(images).argmax(1) == labels).sum())


def _elements(make: Callable[[], nn.Module], found: Bottlenecks) -> list[int]:
    """Numbers of an image that cross each border of the model as it is."""
    model, sizes = make(), list[int]()
    for place in found.places:
        layer = model.get_submodule(place.layer)
        layer.register_forward_hook(lambda _layer, _args, x: sizes.append(x.numel()))
    with torch.no_grad():
        model.eval()(torch.zeros(1, 1, 8, 8))
    return sizes


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Right answers of all seeds together, against all features as float32 with the same seeds; the goals."""
    by_case: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["subject"], row["rank"], row["codec"]), {})[row["seed"]] = row
    table = []
    for (subject, rank, codec), own in by_case.items():
        plain = by_case.get((subject, 0, "none"), {})
        both = [seed for seed in own if seed in plain]
        if not both:
            continue
        share, before = (
            sum(found[seed]["right"] for seed in both) / sum(found[seed]["of"] for seed in both)
            for found in (own, plain)
        )
        table.append(
            {
                "subject": subject,
                "rank": rank,
                "codec": codec,
                "fewer": own[both[0]]["fewer"],
                "accuracy": share,
                "worse": before - share,
                "seeds": len(both),
            }
        )
    met = {
        f"{subject}: ≥ {FEWER:g} times fewer bytes, accuracy within {WORSE:.1%}": any(
            row["subject"] == subject and row["rank"] and row["fewer"] >= FEWER and row["worse"] <= WORSE
            for row in table
        )
        for subject in dict.fromkeys(row["subject"] for row in rows)
    }
    return {"table": table, "goals": met}


def show(figures: dict[str, Any]) -> None:
    for row in figures["table"]:
        crosses = f"{row['rank'] or 'all'} features"
        print(
            f"{row['subject']:8} {crosses:14} {row['codec']:6} {row['fewer']:7.1f} times fewer  "
            f"accuracy {row['accuracy']:.4f} (worse by {row['worse']:+.4f}, {row['seeds']} seeds)"
        )
    report.show_goals(figures["goals"])
