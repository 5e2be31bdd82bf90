"""Costs of a model, in a run or only planned: blocks, the stages of each layout, and their memory.

A planned model has no weights: it is built, traced and cut on torch's meta device, which takes seconds and no
memory even for a model that no machine could hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.authoring.package_model import DEFAULT_STAGES, quietly
from hetpeer.bootstrap.authoring.user_code import build_model, with_loss
from hetpeer.bootstrap.pretrained.adapters import LoraSettings, adapt
from hetpeer.bootstrap.pretrained.source import ModelSource, is_named
from hetpeer.bootstrap.pretrained.tasks import Task
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.bootstrap.samples.packing import IDS, LABELS, MASK
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.data.shards import TARGETS, TOKENS
from hetpeer.stages.pipeline.place_memory import Upkeep

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hetpeer.bootstrap.run.manifest import Manifest
    from hetpeer.stages.graph.block_spec import BlockSpec
    from hetpeer.stages.graph.graph_cost import BlockCostRow
    from hetpeer.stages.worker.memory_footprint import StageMemory

IMAGE_SIZE = 224
"""Width and height of an image if the model's configuration does not say."""


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
    found = _inspection(
        manifest.name,
        specs,
        manifest.layouts,
        manifest.upkeep,
        microbatches,
        casts=manifest.training.keeps_cast,
    )
    return replace(found, run_id=run.run_id, manifest=manifest)


def plan_model(
    model: str,
    *,
    task: Task | None = None,
    batch: int,
    sequence_length: int,
    loss: str | None = None,
    lora: str | None = None,
    bottleneck: int | None = None,
    stages: Sequence[int] = (),
    training: TrainingSettings,
) -> ModelCosts:
    """Costs of the author's `model` ("module.py:function", or a name) for a microbatch of `batch` samples.

    `task`, `lora`, `bottleneck` and `stages` as in `create_run`; of `training` only dtype and recomputation
    matter. Raises HP-MODEL-*, HP-RUN-001.
    """
    import torch

    from hetpeer.bootstrap.authoring.bottlenecks import narrowed
    from hetpeer.stages.tracing.assemble import ComputeMode
    from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
    from hetpeer.stages.tracing.stand_ins.checkpoints import plain_checkpoints
    from hetpeer.stages.tracing.trace import trace

    planned, task = _without_weights(model, task)
    if lora is not None:
        with torch.device("meta"):
            adapt(planned, LoraSettings.parse(lora), task if is_named(model) else None)
    sample = sample_like(planned, task, batch, sequence_length)
    autocast = training.dtype == "bf16"
    with plain_checkpoints() as checkpoints:
        module = with_loss(planned, loss, sample)
        dag = trace(module, sample, autocast=autocast)
    mode = ComputeMode(autocast=autocast, recompute=training.recompute or checkpoints.used)
    at_least = max(stages, default=1)
    specs = cut_blocks(dag, mode=mode, at_least=at_least)
    counts = stages or [min(DEFAULT_STAGES, len(specs))]
    layouts = [balanced_ranges(specs, count) for count in counts]
    if bottleneck is not None:
        with plain_checkpoints():
            _, specs, _ = narrowed(
                module, sample, dag, layouts, bottleneck, mode, at_least=at_least, seed=0, tell=quietly
            )
    kept = len(training.optimizer.keeps)
    upkeep = Upkeep(kept=kept, in_state=1 + kept)
    return _inspection(Path(model).name, specs, layouts, upkeep, None, casts=training.keeps_cast)


def _without_weights(model: str, task: Task | None) -> tuple[nn.Module, Task]:
    """The author's model on torch's meta device, and what it learns.

    A function that reads weights cannot do so there: its model is built with them, and then loses them.
    """
    import torch

    from hetpeer.bootstrap.pretrained import load

    if is_named(model):
        return load.planned(ModelSource.parse(model), task)
    try:
        with torch.device("meta"):
            built = build_model(model, 0)
    except LocalError:
        built = build_model(model, 0)
        _drop_weights(built)
    load.without_cache(built)
    return built, task or Task.CAUSAL_LM


def _drop_weights(model: nn.Module) -> None:
    """Move a model to torch's meta device; unlike `Module.to`, tied parameters stay tied."""
    import torch
    from torch import nn

    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def meta(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            empty: Tensor = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = tensor, empty  # the old one stays alive, so that its id is not used again
        return moved[id(tensor)][1]

    for module in model.modules():
        parts: tuple[Any, Any] = module._parameters, module._buffers  # noqa: SLF001 (`Module.to` changes these, too)
        for tensors in parts:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = meta(tensor)


def sample_like(model: nn.Module, task: Task, batch: int, sequence_length: int) -> dict[str, Tensor]:
    """A microbatch of the arrays that `model` takes for `task`, without their content.

    Ids and labels of tokens are int64 [batch, sequence_length]. Images have the size that the model's
    configuration says.
    """
    import torch

    def empty(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty((batch, *sizes), dtype=dtype, device="meta")

    names = inspect.signature(model.forward).parameters
    if task is Task.IMAGE_CLASSIFICATION:
        config: Any = getattr(model, "config", None)
        size = getattr(config, "image_size", None) or IMAGE_SIZE
        sides = (size, size) if isinstance(size, int) else tuple(size)
        pixels = empty(getattr(config, "num_channels", 3), *sides, dtype=torch.float32)
        return {"pixel_values": pixels, LABELS: empty()}
    if IDS not in names:
        return {name: empty(sequence_length) for name in (TOKENS, TARGETS)}
    labels = empty() if task is Task.SEQUENCE_CLASSIFICATION else empty(sequence_length)
    sample = {IDS: empty(sequence_length), LABELS: labels}
    return sample | ({MASK: empty(sequence_length)} if MASK in names else {})


def _inspection(
    name: str,
    specs: Sequence[BlockSpec],
    layouts: Sequence[Sequence[tuple[int, int]]],
    upkeep: Upkeep,
    microbatches: int | None,
    *,
    casts: bool,
) -> ModelCosts:
    """Costs of the model `specs` under each of `layouts`."""
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
                    memory=stage_memory(
                        specs[begin:end], len(layout) - 1 - number, upkeep, microbatches, casts=casts
                    ),
                )
                for number, (begin, end) in enumerate(layout)
            ]
            for layout in layouts
        ],
        tied=tied_parameters(specs),
    )
