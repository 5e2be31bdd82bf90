"""The author's model, by name or from a function of a file, and the tokenizer that belongs to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.authoring.run_data import (
    IMAGE_SIZE,
    DataOptions,
    check_options,
    is_function,
    not_alike,
)
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.pretrained import load
from hetpeer.bootstrap.pretrained.class_images import images_as_they_are, images_for
from hetpeer.bootstrap.pretrained.kept import FOLDER, KeptFiles
from hetpeer.bootstrap.pretrained.source import ModelSource, is_named
from hetpeer.bootstrap.pretrained.tasks import LABEL_FIELDS, OF_TEXTS, Task
from hetpeer.bootstrap.run.run_directory import Author, RunDirectory
from hetpeer.bootstrap.samples.image_samples import PIXELS, ImageData
from hetpeer.bootstrap.samples.packing import IDS
from hetpeer.bootstrap.samples.tokenizer import Tokenizer, unusable_tokenizer
from hetpeer.dht.base.errors import LocalError

if TYPE_CHECKING:
    from torch import nn

SMALLER = 0.9
"""A tokenizer with fewer ids than this share of the embedding's rows is hardly the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorModel:
    """The author's module, and what the data must be like for it."""

    module: nn.Module
    task: Task
    part: str | None
    """Name of the one model of transformers in the module (`Author.part`)."""
    tokenizer: Tokenizer | None
    """Tokenizer of the data's texts; for data of a function, the one that the export gets."""
    images: ImageData | None
    """The images that `--data` names; None: it names no folder of images."""

    @property
    def pixels(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """`Author.pixels`."""
        if self.images is None or not self.images.preparation.scale:
            return None
        return self.images.preparation.scale, self.images.preparation.offset

    @property
    def has_evaluation(self) -> bool:
        """Whether the folder of images has a part that is evaluated."""
        return self.images is not None and self.images.evaluated is not None


def author_model(
    author: Author,
    options: DataOptions,
    *,
    classes: int | None,
    seed: int,
    folder: Path,
    tell: Callable[[str], None],
) -> AuthorModel:
    """Build or load the author's model, and keep what export needs of it in the run's `folder`.

    Without a tokenizer in `options` a model by name has its own. `tell` gets a line for all that is
    remarkable. Raises `LocalError` HP-MODEL-006, HP-MODEL-012, HP-MODEL-013, HP-DATA-009, and for images
    HP-DATA-001, HP-DATA-008, HP-DATA-010.
    """
    kept = KeptFiles(folder / FOLDER)
    task = None if author.task is None else Task(author.task)
    tokenizer = Tokenizer(options.tokenizer) if options.tokenizer else None
    source = ModelSource.parse(author.model) if is_named(author.model) else None
    if source is None:
        module = build_model(author.model, seed, folder)
    else:
        module, task = load.load(source, task, classes, seed, tell)
        tokenizer = tokenizer or _own_tokenizer(source, task, author.data)
    part, model = load.pretrained_part(module) or (None, None)
    images, processor = None, None
    if task is Task.IMAGE_CLASSIFICATION or _takes_only_pixels(module):
        images, processor = _images(author, options, source, model, tell)
    if model is not None:
        if tokenizer and getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = tokenizer.pad  # a classifier finds the end of a text by it
        kept.keep_model(model, source)
        load.without_cache(module)
        if tokenizer:
            _compare_sizes(model, tokenizer, tell)
    if tokenizer:
        kept.keep_tokenizer(tokenizer)
    if processor is not None:
        kept.keep_processor(processor)
    found = AuthorModel(
        module=module, task=task or Task.CAUSAL_LM, part=part, tokenizer=tokenizer, images=images
    )
    if found.pixels is not None:
        from hetpeer.bootstrap.authoring.loss_module import with_scaled_pixels

        with_scaled_pixels(module, *found.pixels)
    return found


def built_again(run: RunDirectory) -> nn.Module:
    """The author's module once more, with any weights.

    Raises `LocalError` HP-RUN-006 on another machine than the author's, HP-MODEL-006, HP-MODEL-012.
    """
    author = run.author()
    if is_named(author.model):
        model: nn.Module = KeptFiles(run.path / FOLDER).model()
        return model
    return build_model(author.model, run.manifest.seed)


def _takes_only_pixels(module: nn.Module) -> bool:
    """Whether the model's forward takes images and no texts."""
    names = inspect.signature(module.forward).parameters
    return PIXELS in names and IDS not in names


def _images(
    author: Author,
    options: DataOptions,
    source: ModelSource | None,
    model: Any,
    tell: Callable[[str], None],
) -> tuple[ImageData | None, Any]:
    """The images that `--data` names, and an image processor to keep; None if it names no folder."""
    data, eval_data = ([Path(path) for path in paths] for paths in (author.data, author.eval_data))
    if not data or not all(path.is_dir() for path in data):
        return None, None
    if is_function(author.eval_data):
        raise not_alike("--data names images, and --eval-data a function")
    if source is not None:
        check_options(options, "on a model that has an image processor", (IMAGE_SIZE,))
    if source is None:
        return images_as_they_are(options.image_size, data, eval_data, tell), None
    return images_for(model, source, data, eval_data, tell)


def _own_tokenizer(source: ModelSource, task: Task, data: Sequence[str]) -> Tokenizer | None:
    """The tokenizer beside the model. Raises `LocalError` HP-DATA-009 if texts need one and there is none."""
    needed = (task in OF_TEXTS or task in LABEL_FIELDS) and not is_function(data)
    try:
        if source.has_tokenizer:
            return Tokenizer(source.folder or source.name, source.revision)
    except LocalError:
        if needed:
            raise
        return None
    if needed:
        raise unusable_tokenizer(
            source.folder or source.name,
            "the model has none beside it",
            "give one with --tokenizer, or samples with --data FILE.PY:FUNCTION",
        )
    return None


def _compare_sizes(model: nn.Module, tokenizer: Tokenizer, tell: Callable[[str], None]) -> None:
    """Tell of a tokenizer that leaves many rows of the model's embedding unused."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    rows = getattr(embedding, "num_embeddings", 0)
    if tokenizer.vocabulary < SMALLER * rows:
        tell(
            f"the tokenizer has {tokenizer.vocabulary:,} ids and the model's embedding {rows:,} rows: "
            "is it the model's own?"
        )
