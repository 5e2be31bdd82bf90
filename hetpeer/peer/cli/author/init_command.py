"""`hetpeer init`: make a run from a model and its data. The work is done in bootstrap/authoring.

Heavy imports stand inside the function.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hetpeer.peer.cli.author.init_choices import (
    BottleneckOption,
    ClassesOption,
    DataOption,
    EvalDataOption,
    FrozenDtype,
    ImageSizeOption,
    LabelFieldOption,
    LoraOption,
    Mode,
    ModelOption,
    OnBadSample,
    OuterRule,
    PackedOption,
    Shape,
    TaskOption,
    TextFieldOption,
    TokenizerOption,
)
from hetpeer.peer.cli.options import RunDir, cleaned_up
from hetpeer.peer.process.console import say


def init(
    directory: RunDir,
    *,
    model: ModelOption,
    task: TaskOption = None,
    classes: ClassesOption = None,
    data: DataOption = None,
    eval_data: EvalDataOption = None,
    text_field: TextFieldOption = None,
    label_field: LabelFieldOption = None,
    tokenizer: TokenizerOption = None,
    packed: PackedOption = False,
    image_size: ImageSizeOption = None,
    max_samples: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Most samples that are read, held-out ones included (default: all)."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE.PY:FUNCTION",
            help="Function of (outputs of the model, batch) that returns the loss (default: the model "
            "returns it).",
        ),
    ] = None,
    lora: LoraOption = None,
    frozen_dtype: Annotated[
        FrozenDtype,
        typer.Option(help="Form in which frozen parameters are sent, and kept on volunteers' devices."),
    ] = FrozenDtype.FLOAT32,
    bottleneck: BottleneckOption = None,
    steps: Annotated[int, typer.Option(help="Updates of the parameters.")] = 60,
    batch_size: Annotated[int, typer.Option(help="Samples of one update.")] = 128,
    microbatch_size: Annotated[int, typer.Option(help="Samples that are computed at once.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens of one sample of text.")] = 64,
    optimizer: Annotated[str, typer.Option(help="Update rule. {update rules}.")] = "AdamW",
    optimizer_setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Another setting of the update rule, as eps=1e-6; repeatable."
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of the optimizer.")] = 5e-4,
    betas: Annotated[
        tuple[float, float],
        typer.Option(
            help="Decay of the running means of AdamW and NAdam; 0.95 0.95 is good with --staleness."
        ),
    ] = (0.9, 0.95),
    momentum: Annotated[float, typer.Option(help="Momentum of SGD.")] = 0.9,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="Use Nesterov momentum in SGD.")] = False,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay; --group sets another one for some parameters.")
    ] = 0.1,
    schedule: Annotated[
        Shape, typer.Option(help="How the learning rate falls from its peak to the last step.")
    ] = Shape.CONSTANT,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps at the start in which the learning rate rises.")
    ] = 0,
    final_ratio: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the learning rate that is left at the last step, if it falls."
        ),
    ] = 0.0,
    clip_norm: Annotated[float, typer.Option(help="Largest norm of the gradient; 0: no clipping.")] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Seed of the initial parameters and of the order of the data.")
    ] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 10,
    eval_samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Held-out samples of one evaluation, each once (default: at most the batch size, but all of "
            "--eval-data and of a part val of --data).",
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 10,
    on_bad_sample: Annotated[
        OnBadSample,
        typer.Option(
            help="What to do if a sample cannot be computed (no label is left, an id is beyond the "
            "embedding): halt the run and name the sample, or skip its microbatch."
        ),
    ] = OnBadSample.HALT,
    dtype: Annotated[
        str, typer.Option(help="Number format in which workers compute: float32 or bf16.")
    ] = "float32",
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Save memory: run the forward pass twice instead of keeping activations, in all blocks "
            "and at all volunteers (default: only where memory is short).",
        ),
    ] = False,
    staleness: Annotated[
        int,
        typer.Option(
            min=0,
            max=8,
            metavar="STEPS",
            help="Overlap steps: begin a step up to so many steps early. Nobody waits, and gradients are "
            "that much older.",
        ),
    ] = 0,
    fresh_steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="With --staleness: steps at the start that do not overlap (default: --warmup-steps).",
        ),
    ] = None,
    head_start: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="MICROBATCHES",
            help="With --staleness: microbatches of a step that are computed early; the others use the "
            "newest parameters.",
        ),
    ] = None,
    last_staleness: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="With --staleness: how old parameters of the last stage may be; those of each stage before "
            "it one step more (default: all as old).",
        ),
    ] = None,
    compensation: Annotated[
        float,
        typer.Option(
            metavar="λ",
            help="With --staleness: strength of the correction of old gradients (DC-ASGD); 0: none.",
        ),
    ] = 0.0,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN:KEY=VALUE,…",
            help="Settings of parameters whose name matches, as '*.bias:weight_decay=0'; repeatable, the "
            "first match counts.",
        ),
    ] = None,
    codec: Annotated[
        str,
        typer.Option(
            help="Strongest compression on slow links: {codecs}; auto: the strongest that can be checked."
        ),
    ] = "none",
    backward_codec: Annotated[
        str | None, typer.Option(help="The same for gradients (default: as --codec).")
    ] = None,
    ratio: Annotated[float, typer.Option(help="Largest factor by which a link may compress.")] = 100.0,
    ratio_warmup: Annotated[int, typer.Option(help="First steps, in which that factor rises from 4.")] = 0,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Compress on every link by --ratio, not on slow ones only.")
    ] = False,
    reduce_codec: Annotated[
        str,
        typer.Option(
            help="Format of gradients and parameters that are sent to be added up: {reduce codecs}. With "
            "none, they arrive bit for bit. {sparse codecs} is for --mode grouped --outer nesterov: "
            "pipelines send the largest of what they have moved, and all of them average together."
        ),
    ] = "none",
    feedback: Annotated[
        bool,
        typer.Option("--feedback", help="Add what compression left out of a gradient to the next gradient."),
    ] = False,
    stages: Annotated[
        list[int] | None,
        typer.Option(
            metavar="K",
            help="Stages of a pipeline; repeat it to cut several clusters differently (default: 2).",
        ),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="exact: each update is that of one big machine. grouped: each pipeline trains batches of "
            "its own, and pipelines"
            " that are ready at about the same time average their parameters."
        ),
    ] = Mode.EXACT,
    span: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --mode grouped: after so many averagings of each pipeline, all have exchanged "
            "parameters.",
        ),
    ] = 10,
    window: Annotated[
        str,
        typer.Option(
            metavar="SECONDS | adaptive | all",
            help="With --mode grouped: how long the first pipeline that is ready waits for others.",
        ),
    ] = "adaptive",
    interval: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="BATCHES",
            help="With --mode grouped: batches between two averagings; more for slow connections.",
        ),
    ] = 1,
    delayed: Annotated[
        bool,
        typer.Option(
            "--delayed",
            help="With --mode grouped: train on while parameters are averaged; with --staleness without any "
            "pause.",
        ),
    ] = False,
    corrected: Annotated[
        bool,
        typer.Option(
            "--corrected",
            help="With --mode grouped and AdamW or NAdam: divide the gradient's variance by the size of the "
            "group. Takes one more number for each parameter.",
        ),
    ] = False,
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="With --mode grouped: clip parameters that are far from the others, so that a few pipelines "
            "cannot spoil the mean.",
        ),
    ] = False,
    outer: Annotated[
        OuterRule,
        typer.Option(
            help="With --mode grouped: parameters become the mean (none), or go further towards it with "
            "momentum (nesterov, as DiLoCo).",
        ),
    ] = OuterRule.NONE,
    outer_learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of --outer nesterov (default: 0.7; with topk2 1).")
    ] = None,
    outer_momentum: Annotated[
        float | None, typer.Option(help="Momentum of --outer nesterov (default: 0.9; with topk2 0).")
    ] = None,
    reliable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Id of another reliable peer, as `hetpeer id --reliable` prints it there; name two or four.",
        ),
    ] = None,
    admission: Annotated[str, typer.Option(metavar="POLICY", help="{admission policies}.")] = "open",
    work_bits: Annotated[
        int,
        typer.Option(
            min=0,
            max=32,
            metavar="N",
            help="Work that a new identity costs: 2^N hashes, about a second for N = 20.",
        ),
    ] = 0,
    per_network: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Volunteers of one network (/24, /48) at a time; 0: no limit."),
    ] = 0,
    spot_checks: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Share of the work that a second volunteer computes again; false numbers lead to a ban "
            "(default: 0.05 if everybody may take part, otherwise 0).",
        ),
    ] = None,
    unchecked: Annotated[
        bool,
        typer.Option("--unchecked", help="Let everybody take part, and check nothing of what they compute."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="The run's name (default: the directory's).")] = None,
) -> None:
    """Make a run from a torch model and its data.

    DIR is a new folder for it, the run directory.
    """
    given = locals()
    from hetpeer.bootstrap.authoring.create import create_run
    from hetpeer.bootstrap.authoring.run_data import DataOptions
    from hetpeer.peer.cli.author.init_settings import settings_of
    from hetpeer.peer.cli.author.init_summary import summary

    settings = settings_of(given)
    options = DataOptions(
        text_field=text_field,
        label_field=label_field,
        tokenizer=tokenizer,
        max_samples=max_samples,
        packed=packed,
        eval_samples=eval_samples,
        image_size=image_size,
    )
    with cleaned_up():
        run = create_run(
            directory,
            model=model,
            task=task,
            classes=classes,
            loss=loss,
            lora=lora,
            frozen_dtype=frozen_dtype,
            bottleneck=bottleneck,
            data=data or (),
            eval_data=eval_data or (),
            name=name,
            seed=seed,
            sequence_length=sequence_length,
            reading=options,
            stages=stages or (),
            training=settings.training,
            links=settings.links,
            averaging=settings.averaging,
            reliable=reliable or (),
            admission=settings.admission,
            trust=settings.trust,
            tell=say,
        )
    for line in summary(run, of_library=not data, adapters=lora is not None):
        print(line)
    print(f"next: hetpeer bootstrap {directory}")
