"""Workload of one step of the model to plan for: a run directory, or a preset GPT such as `gpt3-6.7b`.

Also the error for a swarm whose devices have too little memory for that model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.seat_plan import PlannedModel, model_digest
from hetpeer.bootstrap.run.step_workload import FLOAT, of_manifest
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.planning.device_files import GIB, NamedDevices
from hetpeer.stages.pipeline.place_memory import Upkeep
from hetpeer.stages.planning.swarms.pipeline_cuts import lacking
from hetpeer.stages.planning.swarms.plan_inputs import StepDemand

ADAMW_KEEPS = 2
BFLOAT16 = 2
KEPT_PER_WIDTH = 34 / 2
"""Numbers per token and width that a transformer layer keeps for its backward, without the attention matrix
(Korthikanti et al., arXiv 2205.05198, 4.1).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """Sizes of a GPT: those of Brown et al. (2020), table 2.1, or of GPT-2."""

    layers: int
    width: int
    vocabulary: int = 50257
    context: int = 1024


PRESETS = {
    "gpt2": Gpt(layers=12, width=768),
    "gpt2-medium": Gpt(layers=24, width=1024),
    "gpt2-large": Gpt(layers=36, width=1280),
    "gpt2-xl": Gpt(layers=48, width=1600),
    "gpt3-1.3b": Gpt(layers=24, width=2048, context=2048),
    "gpt3-6.7b": Gpt(layers=32, width=4096, context=2048),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetChoices:
    """How a preset is trained; a run's manifest says it for a run."""

    bf16: bool = False
    """Whether products are computed in bfloat16, and a GPU's copies of their weights are (docs/memory.md)."""
    recompute: bool = False


USUAL = PresetChoices()


def work_of(
    model: str,
    microbatches: int | None,
    ratio: float | None = None,
    choices: PresetChoices = USUAL,
) -> StepDemand:
    """Workload of a run directory or a preset.

    `microbatches` of a step: None takes the run's own, or 64. `ratio`: factor by which slow links may
    compress activations and their gradients; None takes the run's, or 1. `choices` are of a preset; a run's
    manifest has its own. Raises `LocalError` HP-PLAN-004.
    """
    work = _work_of(model, microbatches, choices)
    if ratio is None:
        return work
    squeezed = replace(work.compression, forward=ratio, backward=ratio, adaptive=True)
    return replace(work, compression=squeezed)


def _work_of(model: str, microbatches: int | None, choices: PresetChoices) -> StepDemand:
    """Workload of a preset or a run, compressed as the run says. Raises `LocalError` HP-PLAN-004."""
    if model in PRESETS:
        return preset(PRESETS[model], microbatches or 64, choices)
    if not Path(model).is_dir():
        raise LocalError(
            "HP-PLAN-004",
            f"{model} is neither a run directory nor a model that hetpeer knows",
            why=f"it knows {', '.join(PRESETS)}",
            fix="make one with `hetpeer init`",
            exit_code=ExitCode.CONFIG,
        )
    manifest = RunDirectory.open(Path(model)).manifest
    return of_manifest(manifest, microbatches or manifest.training.microbatches)


def planned_model(model: str) -> PlannedModel:
    """Blocks and digest of the model that a plan is for. `model` as for `work_of`, which has accepted it."""
    if model in PRESETS:
        return PlannedModel(blocks=PRESETS[model].layers)
    manifest = RunDirectory.open(Path(model)).manifest
    return PlannedModel(blocks=len(manifest.blocks), digest=model_digest(manifest))


def preset(gpt: Gpt, microbatches: int, choices: PresetChoices = USUAL) -> StepDemand:
    """AdamW; one sequence a microbatch, one layer a block; embedding and tied head at the ends."""
    tokens, width, layers = gpt.context, gpt.width, gpt.layers
    tables = np.zeros(layers)
    tables[0] = (gpt.vocabulary + gpt.context) * width
    parameters = np.full(layers, 12.0 * width * width + 13.0 * width) + tables
    flops = np.full(layers, 24.0 * tokens * width * width + 4.0 * tokens * tokens * width)
    flops[-1] += 2.0 * tokens * width * gpt.vocabulary
    crossing = np.full(layers + 1, float(FLOAT * tokens * width))
    crossing[[0, -1]] = 0.0
    kept = FLOAT if choices.recompute else KEPT_PER_WIDTH * (BFLOAT16 if choices.bf16 else FLOAT)
    return StepDemand(
        flops=flops,
        constants=np.zeros(layers),
        numbers=parameters,
        looked_up=tables,
        halved=np.full(layers, 12.0 * width * width) if choices.bf16 else None,
        upkeep=Upkeep(kept=ADAMW_KEEPS),
        kept=np.full(layers, kept * tokens * width),
        crossing=crossing,
        reduced=FLOAT * parameters,
        state=(1 + ADAMW_KEEPS) * FLOAT * parameters,
        microbatches=microbatches,
        recompute=choices.recompute,
    )


def too_small(named: NamedDevices, work: StepDemand, model: str) -> LocalError:
    """HP-PLAN-005, with what would be enough."""
    device, missing = lacking(named.devices, work)
    offered = named.devices.memory.sum() + sum(one.host for one in named.devices.beside)
    apart = named.devices.offered(device).apart
    names = (" of GPU memory", " of main memory", " of disk") if apart else ("", "", " of disk")
    more = [
        f"{math.ceil(10 * nbytes / GIB) / 10:.1f} GiB{name} more"
        for nbytes, name in zip((missing.device, missing.host, missing.disk), names, strict=True)
        if nbytes
    ]
    return LocalError(
        "HP-PLAN-005",
        f"{model} does not fit into the memory of these {len(named.names)} devices",
        why=f"their {offered / GIB:.1f} GiB are not enough, or are spread over too small devices",
        fix=f"it needs {' and '.join(more)} on {named.names[device]}, or more devices",
        exit_code=ExitCode.TOO_SMALL,
    )
