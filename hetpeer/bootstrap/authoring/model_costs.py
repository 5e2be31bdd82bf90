"""Costs of a model, in a run or only planned: blocks, the stages of each layout, and their memory.

A planned model has no weights: it is built, traced and cut on torch's meta device, which takes seconds and no
memory even for a model that no machine could hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetpeer.bootstrap.authoring.package_model import DEFAULT_STAGES
from hetpeer.bootstrap.authoring.user_code import build_objective
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.stages.data.shards import TARGETS, TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from hetpeer.bootstrap.run.manifest import Manifest
    from hetpeer.stages.graph.block_spec import BlockSpec
    from hetpeer.stages.graph.graph_cost import BlockCostRow
    from hetpeer.stages.worker.memory_footprint import StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """A stage of a layout: blocks [begin, end), for a full microbatch."""

    begin: int
    end: int
    flops_forward: int
    flops_backward: int
    leaves: Mapping[str, int]
    """Value sent to the next stage → bytes; the loss for the last stage."""
    memory: StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """A model's blocks and their costs."""

    name: str
    run_id: str
    """Empty for a planned model."""
    manifest: Manifest | None
    """None for a planned model."""
    specs: Sequence[BlockSpec]
    costs: Sequence[BlockCostRow]
    layouts: Sequence[Sequence[StageCost]]
    tied: Mapping[str, Sequence[int]]
    """Parameter that several blocks use → those blocks."""

    @property
    def batch(self) -> int:
        """Samples of a full microbatch."""
        return self.specs[0].batch

    @property
    def parameters(self) -> int:
        """Elements of all parameters; a tied one counts once."""
        counts = {name: tensor.count for spec in self.specs for name, tensor in spec.parameter_specs.items()}
        return sum(counts.values())


def inspect_run(directory: Path) -> ModelCosts:
    """Costs of the model in a run directory. Raises `LocalError` HP-RUN-*."""
    run = RunDirectory.open(directory)
    manifest = run.manifest
    specs = [run.block_spec(block) for block in manifest.blocks]
    microbatches = manifest.training.microbatches
    found = _inspection(manifest.name, specs, manifest.layouts, manifest.kept, microbatches)
    return replace(found, run_id=run.run_id, manifest=manifest)


def plan_model(
    model: str,
    sample: Mapping[str, Tensor],
    *,
    loss: str | None = None,
    stages: Sequence[int] = (),
    training: TrainingSettings,
) -> ModelCosts:
    """Costs of the author's `model` ("module.py:function") for a microbatch like `sample` (meta tensors).

    `stages` as in `create_run`; of `training` only dtype and recomputation matter. Raises HP-MODEL-*.
    """
    import torch

    from hetpeer.stages.tracing.assemble import ComputeMode
    from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
    from hetpeer.stages.tracing.trace import trace

    with torch.device("meta"):
        built = build_objective(model, loss, 0, sample)
    mode = ComputeMode(autocast=training.dtype == "bf16", recompute=training.recompute)
    specs = cut_blocks(trace(built, sample, autocast=mode.autocast), mode=mode)
    counts = stages or [min(DEFAULT_STAGES, len(specs))]
    layouts = [balanced_ranges(specs, count) for count in counts]
    return _inspection(Path(model).name, specs, layouts, len(training.optimizer.keeps), None)


def text_sample(batch: int, sequence_length: int) -> dict[str, Tensor]:
    """A microbatch of text without its content: tokens and targets, int64 [batch, sequence_length]."""
    import torch

    shape = (batch, sequence_length)
    return {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in (TOKENS, TARGETS)}


def _inspection(
    name: str,
    specs: Sequence[BlockSpec],
    layouts: Sequence[Sequence[tuple[int, int]]],
    kept: int,
    microbatches: int | None,
) -> ModelCosts:
    """Costs of the model `specs` under each of `layouts`; `kept`: optimizer vectors per block."""
    from hetpeer.stages.graph.graph_cost import block_cost, tied_parameters
    from hetpeer.stages.worker.memory_footprint import stage_memory

    costs = [block_cost(spec) for spec in specs]
    return ModelCosts(
        name=name,
        run_id="",
        manifest=None,
        specs=specs,
        costs=costs,
        layouts=[
            [
                StageCost(
                    begin=begin,
                    end=end,
                    flops_forward=sum(cost.flops_forward for cost in costs[begin:end]),
                    flops_backward=sum(cost.flops_backward for cost in costs[begin:end]),
                    leaves=costs[end - 1].leaves,
                    memory=stage_memory(specs[begin:end], len(layout) - 1 - number, kept, microbatches),
                )
                for number, (begin, end) in enumerate(layout)
            ]
            for layout in layouts
        ],
        tied=tied_parameters(specs),
    )
