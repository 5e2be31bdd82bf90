"""Options of `hetpeer init` that are one of a few words, and those that `hetpeer inspect` has as well."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from hetpeer.bootstrap.pretrained.tasks import Task

ModelOption = Annotated[
    str,
    typer.Option(
        metavar="MODULE.PY:FUNCTION | hf:FOLDER_OR_ID[@REVISION]",
        help="Function that returns the model; or a model of transformers: its folder, or its id on the hub.",
    ),
]
TaskOption = Annotated[
    Task | None,
    typer.Option(
        help="What the model learns (default: the task of the checkpoint, or causal-lm). It selects the "
        "class of transformers, with its loss, and the kind of samples."
    ),
]
ClassesOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="With hf: and a task of classes: how many there are (default: as in the checkpoint).",
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH | hf:ID[:CONFIG][@REVISION] | MODULE.PY:FUNCTION",
        help="File, folder or data set of the hub, repeatable, or a function that yields samples. Images lie "
        "in one sub-folder for each class. (Default: the source text of Python's library.)",
    ),
]
EvalDataOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH | hf:ID | MODULE.PY:FUNCTION",
        help="Data that is evaluated and not trained on, read as --data is; repeatable (default: a tenth of "
        "--data).",
    ),
]
TextFieldOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Field of a record with its text or chat messages (default: text, or else messages).",
    ),
]
LabelFieldOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Field with a text's class (sequence-classification; default: label) or with the text that is "
        "its answer (seq2seq; default: target).",
    ),
]
PackedOption = Annotated[
    bool,
    typer.Option(
        "--packed",
        help="With a tokenizer: several documents in a sample, which do not see each other, instead of "
        "padding.",
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER | TOKENIZER.JSON",
        help="The model's tokenizer (default: that of a model hf:; otherwise each byte is a token).",
    ),
]
ImageSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="For a model of your own: N by N pixels are cut out of each image (default: images stay as they "
        "are; a model hf: has a size).",
    ),
]
LoraOption = Annotated[
    str | None,
    typer.Option(
        metavar="r=16,alpha=32,targets=all-linear,dropout=0.05",
        help="Train adapters only and freeze the model; targets joined by +, and ,dora for DoRA.",
    ),
]
BottleneckOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="K",
        help="Put trained bottlenecks between the stages: K features cross instead of the model's width "
        "(default: the model stays as it is).",
    ),
]


class Shape(enum.StrEnum):
    """Shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OnBadSample(enum.StrEnum):
    """Consequence of a sample that cannot be computed (docs/trust.md)."""

    HALT = "halt"
    SKIP = "skip"


class FrozenDtype(enum.StrEnum):
    """Form in which frozen parameters are sent and kept (docs/graph.md)."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class Mode(enum.StrEnum):
    """Way in which pipelines agree on parameters (docs/training.md)."""

    EXACT = "exact"
    GROUPED = "grouped"


class OuterRule(enum.StrEnum):
    """Outer optimizer of a grouped run."""

    NONE = "none"
    NESTEROV = "nesterov"
