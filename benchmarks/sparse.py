"""Effect of Top-K between stages on learning, and the worth of the rule for the way back
(docs/links.md).

One process, no network: a GPT of four layers is cut after each but the last; a cut lets a share of the
activations through, and back comes the gradient, either at the same places (ours) or at places chosen anew
(FusionLLM's). All runs see the same data; the loss on held-out text is told with the cuts as in training and
without them, as an exported model has it.

    python -m benchmarks.sparse
"""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from hetpeer.examples.gpt import GPT
from hetpeer.stages.links.codec import kept_of
from hetpeer.stages.links.top_k import largest

WIDTH, LAYERS, HEADS, CONTEXT = 128, 4, 4, 64
BATCH, MICROBATCH, HELD_OUT = 16, 4, 64
CASES: tuple[tuple[str, float, bool], ...] = (
    ("everything", 1.0, True),
    ("half", 0.5, True),
    ("a fifth", 0.2, True),
    ("a fifth, chosen anew on the way back", 0.2, False),
    ("one in twenty", 0.05, True),
    ("one in twenty, chosen anew on the way back", 0.05, False),
)
"""Share that is kept, and whether gradients come back to the same places."""


class Cut(torch.autograd.Function):
    """Keeps the largest elements; the derivative is that of keeping them, or the largest of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, same: bool) -> Tensor:
        kept = only_largest(x, share)
        ctx.share, ctx.same = share, same
        ctx.save_for_backward(kept != 0)
        return kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (gradient * mask if ctx.same else only_largest(gradient, ctx.share)), None, None


def only_largest(x: Tensor, share: float) -> Tensor:
    if share >= 1.0:
        return x.clone()
    flat = x.detach().reshape(-1)
    positions = largest(flat, kept_of(len(flat), share))
    return torch.zeros_like(flat).index_copy_(0, positions, flat[positions]).view_as(x)


def text() -> Tensor:
    """The bytes of Python's own library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(data: Tensor, steps: int, seed: int, share: float, same: bool) -> tuple[float, float]:
    """Held-out loss with the cuts, and without."""
    torch.manual_seed(seed)
    model = GPT(WIDTH, LAYERS, HEADS, CONTEXT, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.1)
    draw = torch.Generator().manual_seed(seed)
    cut_here = True
    for block in list(model.h)[:-1]:
        block.register_forward_hook(lambda _m, _a, out: Cut.apply(out, share, same) if cut_here else out)
    border = len(data) * 9 // 10

    def samples(low: int, high: int, count: int) -> tuple[Tensor, Tensor]:
        begins = torch.randint(low, high - CONTEXT - 1, (count,), generator=draw)
        drawn = torch.stack([data[begin : begin + CONTEXT + 1] for begin in begins])
        return drawn[:, :-1], drawn[:, 1:]

    held_out = samples(border, len(data), HELD_OUT)
    for _ in range(steps):
        tokens, targets = samples(0, border, BATCH)
        optimizer.zero_grad()
        for begin in range(0, BATCH, MICROBATCH):
            part = slice(begin, begin + MICROBATCH)
            (model(tokens[part], targets[part]) * MICROBATCH / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    losses = []
    with torch.no_grad():
        for cut_here in (True, False):  # noqa: B007 - the hook reads it
            parts = [
                model(*(t[i : i + MICROBATCH] for t in held_out)) for i in range(0, HELD_OUT, MICROBATCH)
            ]
            losses.append(statistics.fmean(map(float, parts)))
    return losses[0], losses[1]


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = text(), []
    for name, share, same in CASES:
        seeds = range(options.seed, options.seed + options.seeds)
        found = [train(data, options.steps, seed, share, same) for seed in seeds]
        with_cuts, without = (statistics.fmean(column) for column in zip(*found, strict=True))
        rows.append(
            {"kept": name, "share": share, "same": same, "loss": with_cuts, "uncut": without, "all": found}
        )
        if not options.json:
            print(f"{name}: held-out loss {with_cuts:.4f}, without the cuts {without:.4f}", flush=True)
    document = report.keep("sparse", {"steps": options.steps, "rows": rows}, seed=options.seed)
    if options.json:
        print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
