"""`hetpeer plan`: predict the step time of a swarm, or divide a model among given devices."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import (
    BootstrapOption,
    HomeOption,
    InvitesArgument,
    JsonOption,
    asked,
    run_loop,
    together,
    watching,
)
from hetpeer.peer.limits.amounts import blocks_text

if TYPE_CHECKING:
    from hetpeer.peer.arrival.destinations import Destination
    from hetpeer.peer.planning.step_prediction import Prediction

WATCH_S = 5.0
SECONDS, GRID, GB = 10.0, 8, 0.5
"""Defaults: seconds of search, stages and pipelines of a grid, GB of activations and of gradients."""


class Cost(enum.StrEnum):
    """Cost model of --matrices."""

    DT_FM = "dt-fm"


class Dtype(enum.StrEnum):
    """Number format of a preset."""

    FLOAT32 = "float32"
    BF16 = "bf16"


def plan(
    invites: InvitesArgument = None,
    *,
    bootstrap: BootstrapOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Predict again every few seconds, until Ctrl-C.")
    ] = False,
    matrices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Plan for equal devices: JSON with `latency_ms` and `bandwidth_gbit_s`, N x N lists, from "
            "row to column.",
        ),
    ] = None,
    devices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan for different devices: TOML or JSON (docs/planning.md)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR | PRESET",
            help="With --devices: a run directory, or a model such as gpt2-xl (default: gpt2). With "
            "--matrices and --out: the model whose blocks the stages share.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="With --devices: microbatches of a step (default: as in the run, or 64).",
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            max=1000.0,
            help="With --devices: factor by which slow links may compress activations (default: as in the "
            "run, or 1).",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="With --devices and a preset: bf16 keeps weights on a GPU in 2 bytes (default: float32).",
        ),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="With --devices and a preset: keep no activations inside a stage."),
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --devices: draw the plan into this file.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --devices or --matrices: write the plan for `hetpeer bootstrap DIR --plan FILE`.",
        ),
    ] = None,
    cost: Annotated[
        Cost | None,
        typer.Option(
            help="With --matrices: cost model. dt-fm, the default, counts communication only and takes links "
            "as symmetric."
        ),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="With --matrices: stages of a pipeline (default: 8).")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="With --matrices: number of pipelines (default: 8).")
    ] = None,
    activation_gb: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1e9,
            help="With --matrices: GB that a stage sends to the next for the whole batch of a pipeline "
            "(default: 0.5).",
        ),
    ] = None,
    gradient_gb: Annotated[
        float | None,
        typer.Option(min=0.0, max=1e9, help="With --matrices: GB of the gradient of a stage (default: 0.5)."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="With --devices or --matrices: processor time of the whole command in seconds (default: "
            "10).",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --devices or --matrices: seed of the search (default: 0).",
        ),
    ] = None,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Predict the step time of a running swarm.

    Uses measured links and blocks, and says what limits it. With --devices or --matrices: divide a model
    among the devices of a file.
    """
    if svg is not None and devices is None:
        raise typer.BadParameter("--svg needs --devices")
    if ratio is not None and devices is None:
        raise typer.BadParameter("--ratio needs --devices")
    if devices is not None and matrices is not None:
        raise typer.BadParameter("give either --devices or --matrices")
    traffic = {"--activation-gb": activation_gb, "--gradient-gb": gradient_gb}
    _finite({"--seconds": seconds, "--ratio": ratio, **traffic})
    named = together(invites, bootstrap)
    _only(
        "a running swarm",
        devices is None and matrices is None,
        {"INVITE or --bootstrap": named, "--watch": watch},
    )
    training = {"--dtype": dtype, "--recompute": recompute}
    _only("--devices", devices is not None, {"--microbatches": microbatches, **training})
    enacted = matrices is not None and out is not None
    _only("--devices, or --matrices with --out", devices is not None or enacted, {"--model": model})
    if enacted and model is None:
        raise typer.BadParameter("--matrices with --out needs --model: its blocks are divided")
    sizes = {"--stages": stages, "--replicas": replicas}
    _only("--matrices", matrices is not None, {"--cost": cost, **sizes, **traffic})
    _only(
        "--devices or --matrices",
        devices is not None or matrices is not None,
        {"--seconds": seconds, "--seed": seed, "--out": out},
    )
    if devices is not None:
        from hetpeer.peer.cli.swarm.device_plans import SwarmQuestion, plan_swarm
        from hetpeer.peer.planning.model_workload import PRESETS, PresetChoices

        _only("a preset; the manifest of a run says it", model is None or model in PRESETS, training)
        asked_of = SwarmQuestion(
            devices=devices,
            model="gpt2" if model is None else model,
            microbatches=microbatches,
            ratio=ratio,
            seconds=SECONDS if seconds is None else seconds,
            seed=seed or 0,
            choices=PresetChoices(bf16=dtype is Dtype.BF16, recompute=recompute),
            svg=svg,
            out=out,
        )
        plan_swarm(asked_of, as_json=as_json)
        return
    if matrices is not None:
        from hetpeer.peer.cli.swarm.device_plans import GridQuestion, plan_grid

        asked_for = GridQuestion(
            matrices=matrices,
            stages=GRID if stages is None else stages,
            replicas=GRID if replicas is None else replicas,
            activation_gb=GB if activation_gb is None else activation_gb,
            gradient_gb=GB if gradient_gb is None else gradient_gb,
            seconds=SECONDS if seconds is None else seconds,
            seed=seed or 0,
            model=model,
            out=out,
        )
        plan_grid(asked_for, as_json=as_json)
        return
    run_loop(_look(asked(named, home), watch=watch, as_json=as_json))


def _only(where: str, there: bool, options: Mapping[str, object]) -> None:
    """Refuse `options` unless `there`. One that was not given is None, False or empty."""
    for name, given in options.items():
        if not there and given is not None and given is not False and given != []:
            raise typer.BadParameter(f"{name} has no effect here: it is for {where}")


def _finite(options: Mapping[str, float | None]) -> None:
    """Refuse options that are infinite or NaN, which Typer's limits let through."""
    for name, given in options.items():
        if given is not None and not math.isfinite(given):
            raise typer.BadParameter(f"{name} must be a finite number")


async def _look(goal: Destination, *, watch: bool, as_json: bool) -> None:
    """Print the predicted step time, once or every WATCH_S seconds."""
    from hetpeer.peer.planning.step_prediction import predict
    from hetpeer.peer.watching.status_reader import observing

    async with observing(goal) as onlooker:

        async def look() -> None:
            found = predict(onlooker.signed, await onlooker.adverts())
            print(json.dumps(found.document()) if as_json else "\n".join(_lines(found)), flush=True)

        await (watching(look, WATCH_S) if watch else look())


def _lines(found: Prediction) -> Iterator[str]:
    """Plain text, one fact a line."""
    seconds, measured = found.estimate.seconds, found.measured_s
    yield f"{'run':<10}{found.run}"
    beside = f"; the last one took {measured:.2f} s ({measured / seconds - 1:+.0%})" if measured else ""
    between, together = found.estimate.between_s, found.estimate.staleness + 1
    how = f"{between:.2f} s of it between two steps" if together == 1 else f"{together} steps at a time"
    if found.fresh_steps:
        how += f" after the first {found.fresh_steps}"
    yield f"{'step':<10}{seconds:.2f} s predicted, {how}{beside}"
    for member in found.members:
        blocks = blocks_text(*member.blocks)
        busy = f"computes {member.computing:.0%}, sends {member.sending:.0%} of the time"
        yield f"{'peer':<10}{member.name}  {blocks}  {busy}"
    what, peer = found.estimate.bottleneck
    name = next(member.name for member in found.members if member.peer == peer)
    yield f"{'slowest':<10}{name}, which is {what}"
