"""The most bytes on the device at the first stage of four of a model of 1.3 billion parameters: planned, as
`hetpeer inspect` says, and measured.

The stage is the embedding and six of 24 layers, width 2,048, with its optimizer in main memory and as many
microbatches of 1 x 1,024 tokens under way as 1F1B has there. On a CPU a second set of vectors stands for the
device (benchmarks/offload.py). It takes 12 GiB of memory.

    python -m benchmarks.stage_peak
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.offload import Stage, Trainer
from hetpeer.dht.base.file_pieces import OpenFile
from hetpeer.examples.gpt import GPT
from hetpeer.stages.block.device import pick
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import Upkeep
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from hetpeer.stages.worker.holding.scratch_file import ScratchFile
from hetpeer.stages.worker.memory_footprint import LiveBytes, stage_memory

STAGES = 4
GOAL_BYTES = 4 << 30
NEAR = 0.1
"""Largest accepted difference of plan and measurement."""


def first_stage(options: Any, device: torch.device, *, bf16: bool, recompute: bool) -> Stage:
    """Embedding and a fourth of the layers. The head and what follows are left out."""
    torch.manual_seed(options.seed)
    layers = options.layers // STAGES
    model = GPT(options.width, layers, options.width // 128, options.context, options.vocabulary)
    tokens = torch.zeros(1, options.context, dtype=torch.int64)
    dag = trace(model, {"tokens": tokens, "targets": tokens}, autocast=bf16)
    blocks = cut_blocks(dag, mode=ComputeMode(autocast=bf16, recompute=recompute))
    return Stage(blocks[:-1], 1, device)


def planned(stage: Stage, microbatches: int) -> int:
    """Bytes on the device by plan."""
    memory = stage_memory(stage.blocks, STAGES - 1, Upkeep(), microbatches)
    return memory.demand.room(Offload.HOST, apart=True).device


def measured(stage: Stage, microbatches: int, seed: int) -> int:
    """The most bytes on the device: a slot is there, and all but one microbatch wait for their backward."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = ScratchFile(OpenFile.nameless(Path(folder)), 64 << 30)
        trainer = Trainer(stage, Offload.HOST, scratch, seed)
        trainer.microbatch(0)
        weights = sum(held.weights(0).nbytes for held in trainer.held())

        def work() -> None:
            for number in range(microbatches):
                trainer.forward(number)
            trainer.backward(microbatches - 1)

        if stage.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(stage.device)
            work()
            found = torch.cuda.max_memory_allocated(stage.device)
        else:
            owned = [leaf for held in trainer.held() for leaf in held.weights(0).parameters.values()]
            owned += [held.slot(0, 0).whole() for held in trainer.held()]
            with LiveBytes(owned) as live:
                work()
            found = weights + live.peak
        trainer.close()
        return found


def main() -> int:
    """Measure, keep and show the figures."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    options = parser.parse_args()
    if report.without_gpu(options.device):
        return 0
    torch.set_num_threads(2)
    device = pick(options.device)
    microbatches = 2 * (STAGES - 1) + 1
    figures: dict[str, Any] = {"device": str(device), "microbatches": microbatches}
    for dtype in ("float32", "bf16"):
        for recompute in (False, True):
            stage = first_stage(options, device, bf16=dtype == "bf16", recompute=recompute)
            plan, found = planned(stage, microbatches), measured(stage, microbatches, options.seed)
            figures[f"{dtype}, {'recomputed' if recompute else 'kept'}"] = {
                "parameters": stage.parameters,
                "planned_bytes": plan,
                "measured_bytes": found,
            }
    figures["goals"] = goals(figures)
    figures["met"] = all(figures["goals"].values())
    return report.finish("stage-peak" + ("-gpu" if device.type == "cuda" else ""), figures, options, show)


def goals(figures: dict[str, Any]) -> dict[str, bool]:
    """Goal → whether it is met."""
    cases = {name: one for name, one in figures.items() if isinstance(one, dict)}
    near = {
        f"{name}: measured within {NEAR:.0%} of planned": abs(
            one["measured_bytes"] / one["planned_bytes"] - 1
        )
        <= NEAR
        for name, one in cases.items()
    }
    small = [one["planned_bytes"] <= GOAL_BYTES for name, one in cases.items() if "recomputed" in name]
    return near | {"planned at most 4 GiB with recomputation": all(small)}


def show(figures: dict[str, Any]) -> None:
    """The figures in words."""
    for name, one in figures.items():
        if isinstance(one, dict) and "planned_bytes" in one:
            plan, found = one["planned_bytes"] / 2**30, one["measured_bytes"] / 2**30
            print(
                f"{name}: {one['parameters'] / 1e6:.0f} M parameters, {plan:.2f} GiB planned, "
                f"{found:.2f} measured"
            )
    report.show_goals(figures["goals"])


if __name__ == "__main__":
    sys.exit(main())
