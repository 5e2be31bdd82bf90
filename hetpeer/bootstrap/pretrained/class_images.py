"""Images of classes for the author's model, which prepares them and learns the classes' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.pretrained.image_processor import image_processor, preparation
from hetpeer.bootstrap.pretrained.load import library_errors
from hetpeer.bootstrap.pretrained.source import ModelSource
from hetpeer.bootstrap.samples.image_folder import ImageFolder, parts_of
from hetpeer.bootstrap.samples.image_samples import ImageData, plain
from hetpeer.dht.base.errors import ExitCode, LocalError


def images_for(
    model: Any,
    source: ModelSource,
    data: Sequence[Path],
    eval_data: Sequence[Path],
    tell: Callable[[str], None],
) -> tuple[ImageData, Any]:
    """The images of `data` for a model of transformers, and a processor that does not lie beside it, or None.

    The model's configuration gets the names of the classes. Raises `LocalError` HP-DATA-001, HP-DATA-008,
    HP-DATA-010 if the model has another number of classes, HP-MODEL-012.
    """
    trained, evaluated = _folders(data, eval_data, tell)
    config = model.config
    ids = _class_ids(config, trained.classes, source, tell)
    processor, is_given = image_processor(source, config)
    with library_errors(source):
        prepared = preparation(processor, getattr(config, "num_channels", None) or 3)
    if not is_given:
        size = " x ".join(str(length) for length in dict(processor.size).values() if length)
        tell(
            f"the model has no preprocessor_config.json: images are resized to {size} and scaled as "
            f"{config.model_type} usually is"
        )
    if not prepared.scale:
        tell("images are stored as float32, four times the size: their scaling is not one factor a channel")
    return ImageData(trained, evaluated, ids, prepared), None if is_given else processor


def images_as_they_are(
    size: int | None, data: Sequence[Path], eval_data: Sequence[Path], tell: Callable[[str], None]
) -> ImageData:
    """The images of `data` for another model, which gets colours from 0 to 1, cut to squares of `size`.

    Raises `LocalError` HP-DATA-001, HP-DATA-008.
    """
    trained, evaluated = _folders(data, eval_data, tell)
    ids = {name: number for number, name in enumerate(trained.classes)}
    tell(f"classes: {_shown(trained.classes)}")
    return ImageData(trained, evaluated, ids, plain(size))


def _folders(
    data: Sequence[Path], eval_data: Sequence[Path], tell: Callable[[str], None]
) -> tuple[ImageFolder, ImageFolder | None]:
    """Images for training and for evaluation; `eval_data` wins over parts of `data`."""
    parts = [parts_of(path) for path in data]
    evaluated = [*eval_data] or [own for _, own in parts if own is not None]
    return (
        ImageFolder.read([path for path, _ in parts], tell),
        ImageFolder.read(evaluated, tell) if evaluated else None,
    )


def _class_ids(
    config: Any, names: Sequence[str], source: ModelSource, tell: Callable[[str], None]
) -> Mapping[str, int]:
    """Name → number of each class: the model's own if it knows all names, otherwise their order."""
    own: dict[str, int] = config.label2id or {}
    if set(names) <= own.keys():
        return own
    if len(names) != config.num_labels:
        raise LocalError(
            "HP-DATA-010",
            f"the data has {len(names)} classes, and the model {source.reference} has {config.num_labels}",
            why=f"each sub-folder is a class: {_shown(names)}",
            fix=f"give --classes {max(2, len(names))} for a last layer of that size, or name the folders as "
            "the model does",
            exit_code=ExitCode.CONFIG,
        )
    ids = {name: number for number, name in enumerate(names)}
    config.label2id, config.id2label = ids, {number: name for name, number in ids.items()}
    tell(f"the model's classes are now called {_shown(names)}")
    return ids


def _shown(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)})" if len(names) > most else "")
