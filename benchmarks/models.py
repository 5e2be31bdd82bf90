"""Every example trained by a real swarm: four volunteers, one killed on the way, then the same on one
machine.

For each: the audit from the volunteers' logs, the replay on one machine (losses, norms, final state), and the
exported state dict loaded into the author's own module, whose held-out loss must be the one that the swarm
reported.

    python -m benchmarks.models --steps 20
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import report
from benchmarks.swarm import running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.user_code import build_model, with_loss
from hetpeer.bootstrap.results.export import export
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings

EXAMPLES = Path(__file__).parents[1] / "hetpeer" / "examples"
IMAGES: dict[str, Any] = {"data": [f"{EXAMPLES}/digits.py:data"]}
MODELS: dict[str, dict[str, Any]] = {
    "digits MLP, loss outside": {"model": "digits.py:build", "loss": f"{EXAMPLES}/digits.py:loss", **IMAGES},
    "ResNet with BatchNorm on digits": {"model": "resnet.py:build", **IMAGES},
    "GPT, tied head, dropout": {"model": "gpt.py:build_tied"},
    "transformers GPT-2": {"model": "transformers_models.py:gpt2"},
    "transformers Llama": {"model": "transformers_models.py:llama"},
}
VOLUNTEERS, VICTIM = 4, 3
WITHIN_S, OUTPUT_GATE = 300.0, 1e-5


def training(steps: int) -> TrainingSettings:
    return TrainingSettings(
        steps=steps,
        batch_size=30,  # microbatches of 8, 8, 8 and 6 samples
        microbatch_size=8,
        slot_size=2,
        eval_every=10,
        eval_microbatches=2,
        checkpoint_every=5,
    )


async def train(folder: Path, settings: dict[str, Any], options: Any) -> dict[str, Any]:
    """One example from init to export."""
    fields = {**settings, "model": f"{EXAMPLES}/{settings['model']}"}
    run = create_run(
        folder / "run", **fields, name="example", seed=options.seed, training=training(options.steps)
    )
    began = time.monotonic()
    async with running(run, folder, VOLUNTEERS) as swarm:
        await swarm.until(options.steps // 2, WITHIN_S)
        await swarm.volunteers.pop(VICTIM).kill()
        await swarm.finished(list(swarm.volunteers), WITHIN_S)
        swarm.feed.poll()
        reported = swarm.feed.history.evaluations[options.steps]
    seconds = time.monotonic() - began
    verdict, replayed = audit(run.path), replay(run.path)
    held_out = exported_loss(run)
    difference = abs(held_out - reported) / abs(reported)
    return {
        "parameters": sum(block.parameter_count for block in run.manifest.blocks),
        "blocks": len(run.manifest.blocks),
        "seconds": round(seconds, 1),
        "lost": verdict.lost,
        "duplicated": verdict.duplicated,
        "equal_steps": replayed.equal,
        "held_out_loss": reported,
        "exported_module_difference": difference,
        "met": verdict.ok and replayed.ok and difference <= OUTPUT_GATE,
        "problems": [*verdict.problems, *replayed.problems],
    }


def exported_loss(run: RunDirectory) -> float:
    """The held-out loss of the author's own module with the exported state dict."""
    exported = export(run.path, run.path.parent / "weights.safetensors")
    author, batches, plan = run.author(), run.batches(), run.manifest.data_plan
    example = batches.microbatch(0, 0)
    model = with_loss(build_model(author.model, run.manifest.seed + 1), author.loss, example).eval()
    model.load_state_dict(load_file(exported.weights))
    with torch.no_grad():
        losses = [
            model(
                **{name: torch.from_numpy(array) for name, array in batches.microbatch(0, id_).items()}
            ).item()
            for id_ in plan.evaluation
        ]
        return fmean(losses, plan.evaluation_weights.values())


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="examples with this in their name")
    options = parser.parse_args()
    rows = {}
    for name, settings in MODELS.items():
        if options.only in name:
            with tempfile.TemporaryDirectory(prefix="hetpeer-models-") as folder:
                rows[name] = asyncio.run(train(Path(folder), settings, options))
            if not options.json:
                show(name, rows[name])
    figures = {"steps": options.steps, "models": rows, "met": all(row["met"] for row in rows.values())}
    if not options.only:
        figures = report.keep("models", figures, seed=options.seed)
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["met"] else 1


def show(name: str, row: dict[str, Any]) -> None:
    missed = "" if row["met"] else f"  MISSED {row['problems']}"
    print(
        f"{name:32} {row['parameters']:>9,} parameters, {row['blocks']} blocks, {row['seconds']} s: "
        f"{row['lost']} lost,"
        f" {row['duplicated']} doubled, losses differ by {row['loss_difference']:.1e},"
        f" exported module by {row['exported_module_difference']:.1e}{missed}"
    )


if __name__ == "__main__":
    sys.exit(main())
