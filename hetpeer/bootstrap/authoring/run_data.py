"""The source of samples for the author's model, from the paths of `--data` (docs/data.md)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetpeer.bootstrap.authoring.user_code import DATA, absolute_reference, author_samples
from hetpeer.bootstrap.model_checks.data_fit import check_positions, not_apart
from hetpeer.bootstrap.pretrained.tasks import ARRAYS, LABEL_FIELDS, OF_TEXTS, Task
from hetpeer.bootstrap.run.run_directory import Author
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.bootstrap.samples.formats import DataFile, Format, data_files
from hetpeer.bootstrap.samples.hub_name import PREFIX, HubName
from hetpeer.bootstrap.samples.image_samples import ImageData
from hetpeer.bootstrap.samples.labelled import answers, classes
from hetpeer.bootstrap.samples.packing import IDS, POSITIONS
from hetpeer.bootstrap.samples.record import Progress
from hetpeer.bootstrap.samples.source import (
    Fields,
    SampleSource,
    Source,
    TextSource,
    Wanted,
    enough,
    of_images,
    tokenized,
    with_labels,
)
from hetpeer.bootstrap.samples.tokenizer import Tokenizer
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.array_shards import Look
from hetpeer.stages.data.shards import Arrays
from hetpeer.stages.data.token_shards import python_standard_library_paths

if TYPE_CHECKING:
    from torch import nn

FUNCTION = re.compile(r".+\.py:[^/]*")
OF_TOKENS, FIELDS, IMAGE_SIZE = ("--tokenizer", "--packed"), ("--text-field", "--label-field"), "--image-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """How files become samples, and how many held-out ones an evaluation has."""

    text_field: str | None = None
    """Field of a record that holds a text or the messages of a chat; None: `text`, or else `messages`."""
    label_field: str | None = None
    """Field with the class or the answer of a text; None: LABEL_FIELDS."""
    tokenizer: Path | None = None
    """Folder or tokenizer.json; None: bytes are the tokens."""
    max_samples: int | None = None
    packed: bool = False
    """Several documents in a sample."""
    image_size: int | None = None
    """Edge of the squares that are cut out of images, for a model without an image processor."""
    eval_samples: int | None = None
    """Held-out samples of an evaluation, each once, at most those that there are; None: as training says,
    or all of evaluation data of the author's own.
    """


def absolute_data(data: Sequence[Path | str], option: str = "--data") -> tuple[str, ...]:
    """`data` with absolute paths: one `module.py:function`, or files and data sets.

    Raises `LocalError` HP-DATA-001, HP-DATA-004.
    """
    names = [str(name) for name in data]
    functions = [name for name in names if FUNCTION.fullmatch(name)]
    if not functions:
        return tuple(
            str(HubName.parse(name) if name.startswith(PREFIX) else Path(name).resolve()) for name in names
        )
    if len(names) > 1:
        raise DATA.error(functions[0], f"it is not the only {option}")
    return (absolute_reference(functions[0], DATA),)


def source_of(
    author: Author,
    options: DataOptions,
    wanted: Wanted,
    tokenizer: Tokenizer | None,
    model: nn.Module,
    task: Task,
    training: TrainingSettings,
    images: ImageData | None = None,
) -> Source:
    """The samples of the author's data for `model`, a part of them or `author.eval_data` held out.

    `images`: what the data is, if it is images.

    Raises `LocalError` HP-DATA-*, HP-RUN-001, HP-MODEL-013 for a task whose samples are not made of texts.
    """
    part = replace(wanted, most=options.eval_samples, heldout=1)
    if images is not None:
        check_options(options, "on images", (*OF_TOKENS, *FIELDS))
        if images.evaluated is None:
            return of_images(images.trained, images, wanted)
        return WithEvaluation(
            of_images(images.trained, images, replace(wanted, heldout=0)),
            of_images(images.evaluated, images, part),
        )
    made_for = tokenizer, model, task, training
    if not author.eval_data:
        return _source(author.data, options, wanted, *made_for)
    return WithEvaluation(
        _source(author.data, options, replace(wanted, heldout=0), *made_for),
        _source(author.eval_data, options, part, *made_for),
    )


def _source(
    data: Sequence[str],
    options: DataOptions,
    wanted: Wanted,
    tokenizer: Tokenizer | None,
    model: nn.Module,
    task: Task,
    training: TrainingSettings,
) -> Source:
    """The samples of `data` (`absolute_data`)."""
    if is_function(data):
        check_options(options, "on a data function", (*OF_TOKENS, *FIELDS, IMAGE_SIZE))
        samples = author_samples(data[0])
        if wanted.most is None:
            trained, evaluates = training.steps * training.batch_size, wanted.heldout == 1
            needed = training.batch_size if evaluates else int(trained / (1 - wanted.heldout)) + 2
            option = "--eval-samples" if evaluates else "--max-samples"
            samples = enough(samples, needed, wanted.tell, option)
        return SampleSource(samples, "the data function yields", wanted, Progress(wanted.tell))
    files = data_files(map(Path, data), wanted.tell) or [
        DataFile(path, Format.TEXT) for path in ([] if data else python_standard_library_paths())
    ]
    check_options(options, "on texts", (IMAGE_SIZE,))
    check_positions(model, wanted.length)
    if task in LABEL_FIELDS and tokenizer is not None:
        return _labelled(files, options, wanted, tokenizer, model, task)
    if task not in OF_TEXTS:
        raise _needs_function(task, f"a text or chat alone is no sample of {task}")
    if tokenizer is None:
        check_options(options, "without --tokenizer", OF_TOKENS)
        return TextSource(files, options.text_field, wanted)
    names = inspect.signature(model.forward).parameters
    masked = task is Task.MASKED_LM
    if masked and IDS not in names:
        raise _needs_function(task, f"its forward() takes no {IDS}")
    if options.packed and POSITIONS not in names:
        raise not_apart(f"its forward() takes no {POSITIONS}")
    return tokenized(
        files,
        options.text_field,
        tokenizer,
        wanted,
        pack=options.packed,
        masked=masked,
        takes=names.__contains__,
    )


def _labelled(
    files: Sequence[DataFile],
    options: DataOptions,
    wanted: Wanted,
    tokenizer: Tokenizer,
    model: nn.Module,
    task: Task,
) -> Source:
    """Samples of records that have a text and a label."""
    if options.packed:
        raise not_apart(f"each sample of {task} is one text")
    if task is Task.SEQ2SEQ:
        labels = answers(tokenizer, wanted.length)
    else:
        labels = classes(getattr(getattr(model, "config", None), "label2id", None) or {})
    fields = options.text_field, options.label_field or LABEL_FIELDS[task]
    return with_labels(files, fields, tokenizer, wanted, labels)


class WithEvaluation:
    """Training samples, and evaluation data of the author's own; it is a `Source`.

    Raises `LocalError` HP-DATA-005 if the first samples of the two have different arrays.
    """

    def __init__(self, trained: Source, evaluated: Source) -> None:
        if type(trained) is not type(evaluated):
            raise not_alike("one is text whose bytes are the tokens, the other is not")
        ours, others = (
            {name: f"{array.dtype} {list(array.shape[1:])}" for name, array in one.example(1).items()}
            for one in (trained, evaluated)
        )
        for name in sorted(ours.keys() | others.keys()):
            if ours.get(name) != others.get(name):
                here, there = (which.get(name, "missing") for which in (ours, others))
                raise not_alike(f"{name!r} is {here} in --data and {there} in --eval-data")
        self._trained, self._evaluated = trained, evaluated

    def example(self, count: int) -> Arrays:
        """See `Source`."""
        return self._trained.example(count)

    def write(self, folder: Path, looks: Sequence[Look]) -> Fields:
        """See `Source`."""
        written = self._trained.write(folder, looks)
        return {**written, "heldout": self._evaluated.write(folder, looks)["heldout"]}


def not_alike(why: str) -> LocalError:
    return LocalError(
        "HP-DATA-005",
        "the samples of --eval-data are others than those of --data",
        why=why,
        fix="give both in the same form, with arrays of the same names, dtypes and shapes",
        exit_code=ExitCode.CONFIG,
    )


def is_function(data: Sequence[str]) -> bool:
    """Whether the samples come from a function of the author's."""
    return any(map(FUNCTION.fullmatch, data))


def _needs_function(task: Task, why: str) -> LocalError:
    folder = "a folder with one sub-folder for each class, or " if task is Task.IMAGE_CLASSIFICATION else ""
    return LocalError(
        "HP-MODEL-013",
        f"cannot make samples for {task} of this data",
        why=why,
        fix=f"give {folder}--data FILE.PY:FUNCTION, a function that yields samples with {ARRAYS[task]}",
        exit_code=ExitCode.CONFIG,
    )


def check_options(options: DataOptions, where: str, unused: Sequence[str]) -> None:
    """Raises `LocalError` HP-RUN-001 if one of the options `unused` is given."""
    given = {
        "--tokenizer": options.tokenizer is not None,
        "--packed": options.packed,
        "--text-field": options.text_field is not None,
        "--label-field": options.label_field is not None,
        "--image-size": options.image_size is not None,
    }
    wrong = [name for name in unused if given[name]]
    if wrong:
        raise LocalError(
            "HP-RUN-001",
            f"{' and '.join(wrong)} {'has' if len(wrong) == 1 else 'have'} no effect {where}",
            why="only texts and chats are tokenized and packed, and a model hf: knows the size of its images",
            fix="leave it out, or give the data for which it is",
            exit_code=ExitCode.CONFIG,
        )
