"""Does a bf16 run learn what a float32 run learns?

The same run (model, data, seed) trained twice by a swarm of two volunteers, once with workers that compute in
float32, once under bf16 autocast; the two loss curves side by side.

    python -m benchmarks.bf16 --steps 200
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from benchmarks import report
from benchmarks.swarm import Model, make_run, running
from hetpeer.bootstrap.run.settings import TrainingSettings

VOLUNTEERS = (1, 2)
GOAL = 0.01
WITHIN_S = 1200.0


async def train(folder: Path, dtype: Literal["float32", "bf16"], options: Any) -> dict[str, Any]:
    """Losses by step, and seconds of a step."""
    training = TrainingSettings(
        steps=options.steps,
        batch_size=32,
        microbatch_size=8,
        slot_size=2,
        eval_every=options.steps,
        checkpoint_every=options.steps,
        dtype=dtype,
    )
    model = Model(width=128, layers=4, heads=4, sequence_length=64)
    run = make_run(folder, model, len(VOLUNTEERS), training, options.seed)
    async with running(run, folder, len(VOLUNTEERS)) as swarm:
        await swarm.until(options.steps, WITHIN_S)
        await swarm.finished(VOLUNTEERS, WITHIN_S)
        swarm.feed.poll()
        commits = [swarm.feed.history.commits[step] for step in range(options.steps)]
    return {
        "losses": [round(float(commit["loss"]), 6) for commit in commits],
        "step_s": round(statistics.median(float(commit["seconds"]) for commit in commits), 4),
    }


async def both(options: Any) -> dict[str, Any]:
    curves = {}
    dtypes: tuple[Literal["float32", "bf16"], ...] = ("float32", "bf16")
    for dtype in dtypes:
        with tempfile.TemporaryDirectory(prefix="hetpeer-bf16-") as folder:
            curves[dtype] = await train(Path(folder), dtype, options)
    pairs = list(zip(curves["bf16"]["losses"], curves["float32"]["losses"], strict=True))
    apart = [abs(a - b) / b for a, b in pairs]
    return {
        "steps": options.steps,
        "largest_difference": round(max(apart), 6),
        "mean_difference": round(statistics.fmean(apart), 6),
        "last_losses": {dtype: curve["losses"][-1] for dtype, curve in curves.items()},
        "first_loss": curves["float32"]["losses"][0],
        "curves": curves,
        "met": max(apart) <= GOAL,
    }


def show(figures: dict[str, Any]) -> None:
    last = figures["last_losses"]
    print(
        f"{figures['steps']} steps from a loss of {figures['first_loss']:.4f}: float32 {last['float32']:.4f},"
        f" bf16 {last['bf16']:.4f}\n"
        f"curves differ by {figures['largest_difference']:.2%} at most, {figures['mean_difference']:.2%} on "
        "average;"
        f" goal {GOAL:.0%}: {'met' if figures['met'] else 'missed'}"
    )


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    return report.finish("bf16", asyncio.run(both(options)), options, show)


if __name__ == "__main__":
    sys.exit(main())
