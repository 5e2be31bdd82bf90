"""The job of benchmarks/finetune.py whole, with LoRA, and with LoRA on a base of 4 bits.

The model is trained whole first, and exported; that is the base which the adapters (r = 16) are trained on,
once in float32 and once in int4. Three volunteers in two stages train each run, and one is killed and comes
back. Compared are the bytes of a checkpoint and of the vectors that holders add up in a step, and the
held-out losses; peft loads the adapters on the base.

    python -m benchmarks.adapters
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.finetune import (
    NEAR,
    benchmark,
    evaluations,
    hetpeer,
    make_data,
    make_model,
    make_run,
    shape,
    train,
)
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.stages.graph.block_spec import ITEM_BYTES

RANK, TARGETS = 16, "q_proj+v_proj"
"""The layers are those that peft adapts in a Llama by default."""
LITTLE, APART = 0.02, 0.02
"""Largest share of full training's bytes; largest relative difference of the losses of the two bases."""
WIDTHS = (128, 256, 512, 1024, 2048, 4096)
KINDS = {
    "full": (),
    "lora": (f"--lora=r={RANK},targets={TARGETS}",),
    "lora-int4": (f"--lora=r={RANK},targets={TARGETS}", "--frozen-dtype=int4"),
}


def trained(folder: Path, kind: str, model: Path, data: Path, options: Any) -> tuple[RunDirectory, Any]:
    """The run of one kind after training, and its figures."""
    folder.mkdir()
    run = make_run(folder / "run", model, data, options.steps, options.seed, *KINDS[kind])
    asyncio.run(train(run, folder, options.steps))
    verdict, again, loss = audit(run.path), replay(run.path), evaluations(run)
    figures = {
        "checkpoint_bytes": _checkpoint_bytes(run),
        "sum_bytes": ITEM_BYTES["float32"] * sum(block.vector_count for block in run.manifest.blocks),
        "held_out_at_first": loss[0],
        "held_out": loss[options.steps],
        "exactly_once": verdict.ok,
        "bit_for_bit": f"{again.equal} of {again.steps}",
        "replay_problems": again.problems[:3],
    }
    print(f"{kind}: {figures}", file=sys.stderr, flush=True)
    return run, figures


def _checkpoint_bytes(run: RunDirectory) -> int:
    """Size of the newest checkpoint, all blocks."""
    newest = max(path.name.partition("-")[0] for path in run.checkpoints.iterdir())
    return sum(path.stat().st_size for path in run.checkpoints.glob(f"{newest}-*"))


def peft_loss(run: Path, base: Path, adapter: Path) -> float:
    """Held-out loss of a run's samples by the model that peft makes of `base` and `adapter`."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from benchmarks.finetune_trainer import held_out_loss

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return held_out_loss(RunDirectory.open(run), model)


def shares(width: int) -> dict[str, float]:
    """Share of a model's parameters that adapters on TARGETS, and on all linear layers, have."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape(width)))
    whole = sum(parameter.numel() for parameter in model.parameters())
    sizes = {
        name.rpartition(".")[2]: 4 * RANK * (layer.in_features + layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }
    some = sum(sizes[name] for name in TARGETS.split("+"))
    return {TARGETS: round(some / whole, 4), "all-linear": round(sum(sizes.values()) / whole, 4)}


def measure(options: Any) -> dict[str, Any]:
    """All three runs; figures are kept after each."""
    found: dict[str, Any] = {"width": options.width, "steps": options.steps, "runs": {}}
    found["share_by_width"] = {width: shares(width) for width in WIDTHS}
    with tempfile.TemporaryDirectory(prefix="hetpeer-adapters-") as scratch:
        folder = Path(scratch)
        model, base, data = folder / "model", folder / "base", folder / "chats.parquet"
        make_model(model, options.seed, options.width)
        make_data(data)
        for kind in KINDS:
            run, figures = trained(folder / kind, kind, model if kind == "full" else base, data, options)
            found["runs"][kind] = figures
            if kind == "full":
                hetpeer("export", str(run.path), str(base))
            elif kind == "lora":
                adapter = folder / "adapter"
                hetpeer("export", str(run.path), str(adapter), "--format=adapter")
                said = benchmark("adapters", "--load", run.path, base, adapter)
                figures["peft"] = float(said.split()[-1])
            report.keep("adapters", found, seed=options.seed)
    return found | _verdict(found["runs"])


def _verdict(runs: dict[str, Any]) -> dict[str, Any]:
    full, lora, int4 = (runs[kind] for kind in KINDS)
    share = {
        name: max(one[name] for one in (lora, int4)) / full[name]
        for name in ("checkpoint_bytes", "sum_bytes")
    }
    apart = abs(int4["held_out"] - lora["held_out"]) / lora["held_out"]
    difference = abs(lora["peft"] - lora["held_out"]) / lora["held_out"]
    goals = {
        "bytes of a checkpoint and of a sum": max(share.values()) <= LITTLE,
        "peft's loss is the run's": difference <= NEAR,
        "a base of 4 bits": apart <= APART,
        "exactly once": all(one["exactly_once"] and not one["replay_problems"] for one in runs.values()),
    }
    return {
        "share": {name: round(value, 5) for name, value in share.items()},
        "peft_difference": difference,
        "int4_difference": apart,
        "goals": goals,
        "met": all(goals.values()),
    }


def show(figures: dict[str, Any]) -> None:
    for kind, one in figures["runs"].items():
        print(
            f"{kind}: held-out loss {one['held_out_at_first']:.4f} → {one['held_out']:.6f}; a checkpoint "
            f"{one['checkpoint_bytes']:,} bytes, a sum {one['sum_bytes']:,}; replay {one['bit_for_bit']}"
        )
    print(f"share of full training's bytes: {figures['share']}; by width: {figures['share_by_width']}")
    print(f"peft {figures['peft_difference']:.1e} away, int4 {figures['int4_difference']:.2%}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=100, help="of each run (default: 100)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: 256)")
    parser.add_argument(
        "--load", nargs=3, type=Path, metavar=("RUN", "BASE", "ADAPTER"), help="what a child does"
    )
    options = parser.parse_args()
    if options.load:
        print(peft_loss(*options.load))
        return 0
    return report.finish("adapters", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
