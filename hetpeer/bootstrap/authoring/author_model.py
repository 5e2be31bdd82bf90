"""The author's model, by name or from a function of a file, and the tokenizer that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetpeer.bootstrap.authoring.run_data import is_function
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.pretrained import load
from hetpeer.bootstrap.pretrained.kept import FOLDER, KeptFiles
from hetpeer.bootstrap.pretrained.source import ModelSource, is_named
from hetpeer.bootstrap.pretrained.tasks import LABEL_FIELDS, OF_TEXTS, Task
from hetpeer.bootstrap.run.run_directory import Author, RunDirectory
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


def author_model(
    author: Author,
    asked: Path | None,
    *,
    classes: int | None,
    seed: int,
    kept: KeptFiles,
    tell: Callable[[str], None],
) -> AuthorModel:
    """Build or load the author's model, and keep what export needs of it.

    `asked`: path of a tokenizer; without one a model by name has its own. `tell` gets a line for all that is
    remarkable. Raises `LocalError` HP-MODEL-006, HP-MODEL-012, HP-MODEL-013, HP-DATA-009.
    """
    task = None if author.task is None else Task(author.task)
    tokenizer = Tokenizer(asked) if asked else None
    source = ModelSource.parse(author.model) if is_named(author.model) else None
    if source is None:
        module = build_model(author.model, seed)
    else:
        module, task = load.load(source, task, classes, seed, tell)
        tokenizer = tokenizer or _own_tokenizer(source, task, author.data)
    part, model = load.pretrained_part(module) or (None, None)
    if model is not None:
        if tokenizer and getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = tokenizer.pad  # a classifier finds the end of a text by it
        kept.keep_model(model, source)
        load.without_cache(module)
        if tokenizer:
            _compare_sizes(model, tokenizer, tell)
    if tokenizer:
        kept.keep_tokenizer(tokenizer)
    return AuthorModel(module=module, task=task or Task.CAUSAL_LM, part=part, tokenizer=tokenizer)


def built_again(run: RunDirectory) -> nn.Module:
    """The author's module once more, with any weights.

    Raises `LocalError` HP-RUN-006 on another machine than the author's, HP-MODEL-006, HP-MODEL-012.
    """
    author = run.author()
    if is_named(author.model):
        model: nn.Module = KeptFiles(run.path / FOLDER).model()
        return model
    return build_model(author.model, run.manifest.seed)


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
