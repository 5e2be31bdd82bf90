"""Price of a codec in tokens: how many more a GPT needs for the same held-out loss, by ratio.

A GPT in four stages on the texts of the installed packages, in one process that computes what a swarm
computes: each border writes and reads activations and gradients with the product's own codecs, in the
encoding that a link takes for a ratio (stages/links/adaptive_ratio.py). Evaluations travel as they are. The
learning rate is constant after its warm-up, so losses of different steps can be compared. Every case has the
same tokens in the same order. After all n steps of a case its loss is what the run without a codec had after
n0: the price is n / n0.

`fusionllm` is FusionLLM's own way (arXiv 2410.12707): float32 values with int64 positions, a choice of its
own for gradients, as many bytes. `back` rounds activations by int8 and leaves elements out of gradients
alone, with and without error feedback. `one border` cuts at the middle border only.

`stages/links/token_prices.py` has the prices of `all`, for one border.

    python -m benchmarks.loss_prices --width 128 --context 64 --batch 8 --vocabulary 1024
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.sparse import only_largest
from benchmarks.thin import STAGES, corpus
from hetpeer.examples.gpt import GPT
from hetpeer.stages.links.adaptive_ratio import AdaptiveRatio, coding_for, warmed_up
from hetpeer.stages.links.codec import Codec, kept_of, room
from hetpeer.stages.links.tensor_codecs import decode, encode

LIMIT = Codec.of("topk-int4")
FUSION_BYTES = 3.0
"""Bytes of one of FusionLLM's kept elements, over those of a float32."""
WARMED = 0.3
"""Part of the steps in which the ratio rises, with a warm-up."""
HELD_OUT = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One way to send; `ratio` both ways unless it is named otherwise."""

    name: str
    ratio: float = 1.0


CASES = (
    Case("none"),
    Case("all", 25.0),
    Case("all", 7.5),
    Case("all", 100.0),
    Case("all", 50.0),
    Case("all", 12.0),
    Case("fusionllm", 25.0),
    Case("all, one border", 25.0),
    Case("all, warm-up", 100.0),
    Case("back", 25.0),
    Case("back, feedback", 25.0),
    Case("all", 3.9),
)


class Border:
    """A border between two stages: what crosses is as it is at the other end."""

    def __init__(self, case: Case, steps: int) -> None:
        self.case, self.steps = case, steps
        self.step, self.nbytes = 0, 0
        self.open = True
        """False in an evaluation."""
        self.residual: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        sent: Tensor = _Crossed.apply(x, self) if self.open and self.case.ratio > 1.0 else x
        return sent

    def coding(self, *, gradient: bool) -> AdaptiveRatio:
        """Encoding of this step."""
        name, ratio = self.case.name, self.case.ratio
        if name.endswith("warm-up"):
            ratio = warmed_up(ratio, self.step, round(WARMED * self.steps))
        if name.startswith("back") and not gradient:
            return AdaptiveRatio(Codec.of("int8"))
        return coding_for(LIMIT, ratio)

    def carry(self, x: Tensor, coding: AdaptiveRatio) -> Tensor:
        """`x` written and read; no zeros are sent."""
        flat = x.detach().reshape(-1).contiguous()
        kept = len(flat)
        if coding.codec.sparse:
            kept = max(1, min(kept_of(len(flat), coding.share), int(torch.count_nonzero(flat))))
        written = memoryview(bytearray(room(coding.codec, "float32", len(flat), kept)))
        head, size = encode(coding.codec, flat, kept, written)
        self.nbytes += size
        read = torch.empty_like(flat)
        decode(coding.codec, head, written[:size], read)
        return read.view_as(x)

    def there(self, x: Tensor) -> Tensor:
        """An activation."""
        if self.case.name.startswith("fusionllm"):
            return self._fusion(x)
        return self.carry(x, self.coding(gradient=False))

    def back(self, gradient: Tensor, crossed: Tensor) -> Tensor:
        """The gradient of what `crossed`: of sparse activations at the same places."""
        name, coding = self.case.name, self.coding(gradient=True)
        if name.startswith("fusionllm"):
            return self._fusion(gradient)
        if not name.startswith("back"):
            return self.carry(gradient * (crossed != 0) if coding.codec.sparse else gradient, coding)
        if name.endswith("feedback") and self.residual is not None:
            gradient = gradient + self.residual
        found = self.carry(gradient, coding)
        self.residual = gradient - found
        return found

    def _fusion(self, x: Tensor) -> Tensor:
        share = 1.0 / (FUSION_BYTES * self.case.ratio)
        self.nbytes += round(FUSION_BYTES * 4 * kept_of(x.numel(), share))
        return only_largest(x, share)


class _Crossed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, border: Border) -> Tensor:
        found = border.there(x)
        ctx.border = border
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.border.back(gradient, *ctx.saved_tensors), None


def train(case: Case, data: Tensor, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: its held-out losses, and bytes of a token across a border that is cut."""
    torch.manual_seed(seed)
    model = GPT(options.width, options.layers, options.heads, options.context, options.vocabulary)
    ends = [options.layers * stage // STAGES - 1 for stage in range(1, STAGES)]
    ends = ends[1:2] if case.name.endswith("one border") else ends
    borders = [Border(case, options.steps) for _ in ends]
    for end, border in zip(ends, borders, strict=True):
        model.h[end].register_forward_hook(lambda _layer, _args, x, border=border: border(x))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    draw, held = torch.Generator().manual_seed(seed), len(data) * 9 // 10

    def samples(low: int, high: int, count: int) -> tuple[Tensor, Tensor]:
        begins = torch.randint(low, high - options.context - 1, (count,), generator=draw)
        drawn = torch.stack([data[begin : begin + options.context + 1] for begin in begins])
        return drawn[:, :-1], drawn[:, 1:]

    held_out = samples(held, len(data), HELD_OUT)

    def evaluated() -> float:
        for border in borders:
            border.open = False
        with torch.no_grad():
            parts = zip(*(tensor.split(16) for tensor in held_out), strict=True)
            found = statistics.fmean(float(model(*part)) for part in parts)
        for border in borders:
            border.open = True
        return found

    began, curve = time.monotonic(), [(0, evaluated())]
    for step in range(options.steps):
        for border in borders:
            border.step = step
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / options.warmup)
        optimizer.zero_grad()
        model(*samples(0, held, options.batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            curve.append((step + 1, evaluated()))
    crossed = 2 * 4 * options.width * options.batch * options.context * options.steps * len(ends)
    nbytes = sum(border.nbytes for border in borders)
    return {
        "name": case.name,
        "ratio": case.ratio,
        "seed": seed,
        "loss": curve[-1][1],
        "fewer": crossed / nbytes if nbytes else 1.0,
        "curve": curve,
        "seconds": round(time.monotonic() - began),
    }


def price(curve: list[tuple[int, float]], plain: list[tuple[int, float]]) -> float:
    """Steps of `curve` for its last loss over those of `plain`.

    Both losses are read from parabolas in log steps through the later four fifths of the evaluations: at a
    constant learning rate single ones go up and down by more than codecs differ.
    """
    steps = curve[-1][0]
    own, other = (_parabola([one for one in each if one[0] >= steps / 5]) for each in (curve, plain))
    grid = np.linspace(math.log(steps / 5), math.log(2 * steps), 4000)
    losses = np.minimum.accumulate(np.polyval(other, grid))
    at = float(np.interp(-np.polyval(own, math.log(steps)), -losses, grid))
    return steps / math.exp(at)


def _parabola(curve: list[tuple[int, float]]) -> Any:
    return np.polyfit([math.log(step) for step, _ in curve], [loss for _, loss in curve], 2)


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Price of each case that was run, the mean of the seeds' logarithms."""
    plain = {row["seed"]: row["curve"] for row in rows if row["name"] == "none"}
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["name"], row["ratio"]), []).append(row)
    table = []
    for (name, ratio), own in found.items():
        prices = [price(row["curve"], plain[row["seed"]]) for row in own]
        table.append(
            {
                "name": name,
                "ratio": ratio,
                "fewer": statistics.fmean(row["fewer"] for row in own),
                "loss": statistics.fmean(row["loss"] for row in own),
                "price": math.exp(statistics.fmean(map(math.log, prices))),
                "seeds": len(own),
            }
        )
    return table


def show(table: list[dict[str, Any]]) -> None:
    for row in table:
        print(
            f"{row['name']:18} ratio {row['ratio']:6.1f}  {row['fewer']:6.1f} times fewer bytes  "
            f"loss {row['loss']:.4f}  {row['price']:.3f} times the tokens"
        )


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value in (
        ("width", 384),
        ("layers", 8),
        ("heads", 4),
        ("context", 128),
        ("vocabulary", 2048),
        ("batch", 16),
        ("steps", 1000),
        ("warmup", 30),
        ("every", 25),
        ("megabytes", 8),
        ("seeds", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--only", nargs="*", default=[], help="cases, as 'all 25'; none: all")
    parser.add_argument("--add", action="store_true", help="to the rows of the last result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = f"loss-prices-{options.width}"
    data, rows = corpus(options), []
    if options.add:
        rows = json.loads((report.FOLDER / f"{name}.json").read_text())["rows"]
    chosen = [case for case in CASES if not options.only or f"{case.name} {case.ratio:g}" in options.only]
    for case in chosen:
        seeds = range(options.seed, options.seed + options.seeds)
        rows += [train(case, data, seed, options) for seed in seeds]
        table = judged(rows)
        figures = {"options": vars(options), "tokens": len(data), "table": table, "rows": rows}
        # Each case takes minutes: what one has shown is not lost with the next.
        document = report.keep(name, figures, seed=options.seed)
        show(table[-1:] if not options.json else [])
    if options.json:
        print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
