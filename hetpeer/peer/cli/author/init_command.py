"""`hetpeer init`: from a model and its data to a run. Thin: what it does lives in bootstrap/.

Heavy imports stand inside the functions, so that `hetpeer --help` does not load torch.
"""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from hetpeer.peer.cli.options import RunDir
from hetpeer.peer.process.console import say
from hetpeer.peer.watching.human_units import counted


class Shape(enum.StrEnum):
    """Of the learning rate, after it has risen."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Mode(enum.StrEnum):
    """How clusters come to the same parameters."""

    EXACT = "exact"
    GROUPED = "grouped"


class Policy(enum.StrEnum):
    """Who may take part (docs/admission.md)."""

    OPEN = "open"
    INVITED = "invited"
    LISTED = "listed"


_WHOM = {
    Policy.OPEN: "everybody who has the invite may",
    Policy.INVITED: "everybody who has a voucher may (hetpeer invite DIR --uses N)",
    Policy.LISTED: "everybody on your list may (hetpeer amend DIR --list ID)",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(init)


def init(
    directory: RunDir,
    *,
    model: Annotated[
        str, typer.Option(metavar="MODULE.PY:FUNCTION", help="Function that returns the model.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH | MODULE.PY:FUNCTION",
            help="Text file or folder, may be repeated; or function that yields the samples, mappings of names to numpy"
            " arrays (default: the text of Python's library).",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE.PY:FUNCTION",
            help="Function of (the model's outputs, the batch) that returns the loss (default: the model returns it).",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Updates of the parameters.")] = 60,
    batch_size: Annotated[int, typer.Option(help="Samples of one update.")] = 128,
    microbatch_size: Annotated[int, typer.Option(help="Samples that are computed at once.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Of text: tokens (bytes) of one sample.")] = 64,
    optimizer: Annotated[str, typer.Option(help="AdamW, NAdam (looks ahead, for --staleness) or SGD.")] = (
        "AdamW"
    ),
    learning_rate: Annotated[float, typer.Option(help="Its learning rate.")] = 5e-4,
    betas: Annotated[
        tuple[float, float],
        typer.Option(
            help="Of AdamW and NAdam: how much of the running means is kept. Stale gradients: 0.95 0.95."
        ),
    ] = (0.9, 0.95),
    momentum: Annotated[float, typer.Option(help="Of SGD.")] = 0.9,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="SGD's momentum as Nesterov has it.")] = False,
    weight_decay: Annotated[float, typer.Option(help="Of all parameters (but see --group).")] = 0.1,
    schedule: Annotated[
        Shape, typer.Option(help="How the learning rate falls until the last step.")
    ] = Shape.CONSTANT,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps in which it rises before that.")] = 0,
    final_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="What is left of it at the end, if it falls.")
    ] = 0.0,
    clip_norm: Annotated[float, typer.Option(help="Largest norm of the gradient; 0 does not clip.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides the initial parameters and the order of the data.")] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 10,
    eval_microbatches: Annotated[int, typer.Option(help="Microbatches of one evaluation.")] = 4,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 10,
    dtype: Annotated[str, typer.Option(help="What workers compute in: float32 or bf16.")] = "float32",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Run forward twice instead of keeping activations.")
    ] = False,
    staleness: Annotated[
        int,
        typer.Option(
            min=0,
            max=8,
            metavar="STEPS",
            help="Begin so many steps before the one that they follow is committed: nobody waits, and gradients are so old.",
        ),
    ] = 0,
    fresh_steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="Of --staleness: so many steps come one after the other first (default: --warmup-steps).",
        ),
    ] = None,
    head_start: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="MICROBATCHES",
            help="Of --staleness: only so many of a step are computed early, and the others with the newest parameters.",
        ),
    ] = None,
    compensation: Annotated[
        float,
        typer.Option(
            metavar="λ", help="Of --staleness: change gradients for what was applied meanwhile (DC-ASGD)."
        ),
    ] = 0.0,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN:KEY=VALUE,…",
            help="Other settings for some parameters, as '*.bias:weight_decay=0'; repeatable, the first match counts.",
        ),
    ] = None,
    codec: Annotated[
        str,
        typer.Option(
            help="How far slow links may shrink activations and their gradients: none (bit for bit), bf16, fp16, int8,"
            " int4, topk-bf16, topk-int8, topk-int4."
        ),
    ] = "none",
    backward_codec: Annotated[
        str | None, typer.Option(help="The same for gradients alone (default: as --codec).")
    ] = None,
    ratio: Annotated[float, typer.Option(help="How many times fewer bytes a link may send at most.")] = 100.0,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Shrink on every link, by --ratio, however fast it is.")
    ] = False,
    reduce_codec: Annotated[
        str,
        typer.Option(
            help="How gradients and parameters that are added up are sent: none (bit for bit), bf16, fp16, int8, int4."
        ),
    ] = "none",
    feedback: Annotated[
        bool, typer.Option("--feedback", help="Add what is left out of a gradient to the next one.")
    ] = False,
    stages: Annotated[
        list[int] | None,
        typer.Option(
            metavar="K", help="Stages of a pipeline; repeated: one per cluster in turn (default: 2)."
        ),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="exact: every update is that of one big machine. grouped: each pipeline trains batches of its own, and those that"
            " are ready at about the same time average."
        ),
    ] = Mode.EXACT,
    span: Annotated[
        int,
        typer.Option(min=1, help="Of grouped: any so many groups for each pipeline, in a row, connect all."),
    ] = 10,
    window: Annotated[
        str,
        typer.Option(
            metavar="SECONDS | adaptive | all",
            help="Of grouped: how long the first that is ready waits for others.",
        ),
    ] = "adaptive",
    interval: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="BATCHES",
            help="Of grouped: how much a pipeline trains before it averages; more where lines are slow.",
        ),
    ] = 1,
    delayed: Annotated[
        bool,
        typer.Option("--delayed", help="Of grouped: train the next batches while the last are averaged."),
    ] = False,
    corrected: Annotated[
        bool,
        typer.Option(
            "--corrected", help="Of grouped with AdamW: divide the gradient's variance by the group's size."
        ),
    ] = False,
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="Of grouped: clip what is far from the others, so that a few pipelines cannot move the mean far.",
        ),
    ] = False,
    outer_learning_rate: Annotated[
        float | None,
        typer.Option(help="Of grouped: an outer optimizer (DiLoCo) with this learning rate, such as 0.7."),
    ] = None,
    outer_momentum: Annotated[float, typer.Option(help="Its Nesterov momentum.")] = 0.9,
    reliable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Another reliable peer, as `hetpeer id --reliable` prints it there; two or four of them.",
        ),
    ] = None,
    admission: Annotated[
        Policy,
        typer.Option(
            help="Who may take part: everybody, who has a voucher of yours, or peers that you list."
        ),
    ] = Policy.OPEN,
    work_bits: Annotated[
        int,
        typer.Option(
            min=0, max=32, metavar="N", help="What a new identity costs: 2^N hashes, a second for 20."
        ),
    ] = 0,
    per_network: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Volunteers of one network (/24, /48) at a time; 0: any number."
        ),
    ] = 0,
    spot_checks: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Of what volunteers compute another computes once more; who gives false numbers is banned. 0.05 is a good share for strangers.",
        ),
    ] = 0.0,
    name: Annotated[str | None, typer.Option(help="The run's name (default: the directory's).")] = None,
) -> None:
    """Make a run directory from a torch model and its data."""
    from hetpeer.averaging.optim.learning_rate import knots_of
    from hetpeer.bootstrap.authoring.create import create_run
    from hetpeer.bootstrap.run.manifest import validated
    from hetpeer.bootstrap.run.settings import (
        AdmissionSettings,
        AveragingSettings,
        LinkSettings,
        TrainingSettings,
        TrustSettings,
        parameter_group,
    )
    from hetpeer.dht.base.errors import ExitCode, LocalError

    training = {
        "steps": steps,
        "batch_size": batch_size,
        "microbatch_size": microbatch_size,
        "optimizer": {"name": optimizer, "betas": betas, "momentum": momentum, "nesterov": nesterov},
        "learning_rate": learning_rate,
        "schedule": knots_of(schedule, steps, warmup_steps, final_ratio),
        "weight_decay": weight_decay,
        "clip_norm": clip_norm or None,
        "eval_every": eval_every,
        "eval_microbatches": eval_microbatches,
        "checkpoint_every": checkpoint_every,
        "dtype": dtype,
        "recompute": recompute,
        "staleness": staleness,
        "fresh_steps": (warmup_steps if staleness else 0) if fresh_steps is None else fresh_steps,
        "head_start": head_start,
        "compensation": compensation,
        "groups": [parameter_group(text) for text in group or ()],
        "slot_size": 1,  # of a step with few microbatches the default would be too much
    }
    settings = validated(TrainingSettings, training)
    if schedule is not Shape.CONSTANT and warmup_steps >= steps:
        raise LocalError(
            "HP-RUN-001",
            f"--schedule {schedule} has no step to fall in",
            why=f"the learning rate rises for {warmup_steps} steps, and the run has {steps}",
            fix="give more --steps, or fewer --warmup-steps",
            exit_code=ExitCode.CONFIG,
        )
    links = {
        "codec": codec,
        "backward": backward_codec,
        "ratio": ratio,
        "adaptive": not uniform,
        "feedback": feedback,
        "reduce": reduce_codec,
    }
    outer = {"learning_rate": outer_learning_rate, "momentum": outer_momentum}
    asked = {
        "span": span,
        "window_s": window,
        "interval": interval,
        "delayed": delayed,
        "corrected": corrected,
        "outer": None if outer_learning_rate is None else outer,
        "robust": robust,
    }
    averaging = validated(AveragingSettings, asked)
    if mode is Mode.EXACT and averaging != AveragingSettings():
        raise LocalError(
            "HP-RUN-001",
            "--span, --window, --interval, --delayed, --corrected, --robust and --outer-* are not of an exact run",
            why="pipelines of an exact run are never apart",
            fix="leave them out, or add --mode grouped",
            exit_code=ExitCode.CONFIG,
        )
    if mode is Mode.GROUPED and spot_checks:
        raise LocalError(
            "HP-RUN-001",
            "--spot-checks is not of a grouped run",
            why="in each of its pipelines one volunteer holds a block, so nobody else could compute the same",
            fix="leave it out (--robust clips what is far from the others), or add --mode exact",
            exit_code=ExitCode.CONFIG,
        )
    slot_size = min(settings.microbatches, TrainingSettings.model_fields["slot_size"].default)
    run = create_run(
        directory,
        model=model,
        loss=loss,
        data=data or (),
        name=name,
        seed=seed,
        sequence_length=sequence_length,
        stages=stages or (),
        training=settings.model_copy(update={"slot_size": slot_size}),
        links=validated(LinkSettings, links),
        averaging=averaging if mode is Mode.GROUPED else None,
        reliable=reliable or (),
        admission=validated(
            AdmissionSettings,
            {"policy": admission.value, "work_bits": work_bits, "per_network": per_network},
        ),
        trust=validated(TrustSettings, {"spot_checks": spot_checks}),
        tell=say,
    )
    samples = sum(shard.samples for shard in run.manifest.data.train)
    print(f"run {run.manifest.name}  id {run.run_id}")
    sizes = f"{counted(len(run.manifest.blocks), 'block')}, {run.manifest.parameters:,} parameters"
    print(f"{sizes}, {samples:,} training samples, {counted(steps, 'step')}")
    if not data:
        print("data: the source text of Python's library; choose other data with --data")
    checked = f"{spot_checks:.0%} of their work is computed a second time and compared"
    unchecked = "their work is not checked (for that, see --spot-checks and --admission)"
    print(f"{_WHOM[admission]} take part; {checked if spot_checks else unchecked}")
    print(f"next: hetpeer bootstrap {directory}")
