"""Does the author's model fit the data? The model itself is asked: a forward pass on samples that show it.

`model` is always the author's module as `objective` returns it, which takes a batch and returns the loss. If
it fails on the example already, nothing is said here: tracing names what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpeer.bootstrap.samples.packing import IDS, LABELS, POSITIONS
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.extremes import IGNORED, Extreme
from hetpeer.stages.data.shards import TARGETS, TOKENS, Arrays

if TYPE_CHECKING:
    from torch import nn

    from hetpeer.bootstrap.samples.source import Source

LOOKED_AT = 256
"""Samples among which some are looked for whose loss is finite."""
PADDING_ROWS = 2
"""Rows that some tables of positions have in front of the first position."""
TOLERANCE = 1e-4
"""Largest relative difference of two losses that counts as rounding."""


def telling_example(model: nn.Module, source: Source, count: int) -> Arrays:
    """The first `count` samples, or, if their loss is not finite, the first ones whose own loss is.

    A microbatch whose labels are all ignored has the loss 0/0, and would say nothing of the model.
    """
    example = source.example(count)
    if _is_finite(model, example):
        return example
    more = source.example(max(LOOKED_AT, count))
    rows = [
        row
        for row in range(len(next(iter(more.values()))))
        if _is_finite(model, {name: array[row : row + 1] for name, array in more.items()})
    ]
    chosen = [rows[number % len(rows)] for number in range(count)] if rows else []
    return {name: array[chosen] for name, array in more.items()} if chosen else example


def check_vocabulary(model: nn.Module, example: Arrays, vocabulary: int, tokenizer: Path | str) -> None:
    """Raises `LocalError` HP-DATA-009 if the model fails on the tokenizer's largest id, `vocabulary` - 1."""
    tokens, labels = (IDS, LABELS) if IDS in example else (TOKENS, TARGETS)
    ids = np.zeros_like(example[tokens])
    fitting = {**example, tokens: ids}
    if example[labels].shape == ids.shape:  # else these are classes
        fitting[labels] = np.where(example[labels] == IGNORED, IGNORED, ids)
    largest = ids.copy()
    largest[:, -1] = vocabulary - 1
    why = _failure(model, fitting, {**fitting, tokens: largest})
    if why:
        raise LocalError(
            "HP-DATA-009",
            f"the tokenizer {tokenizer} has more ids than the model",
            why=f"it has ids up to {vocabulary - 1}, and the model fails on that one: {why}",
            fix="give the model's own tokenizer, or a model with so many rows in its embedding",
            exit_code=ExitCode.CONFIG,
        )


def check_borders(model: nn.Module, example: Arrays) -> None:
    """Check that packed documents do not see each other: the loss of the second, with two different firsts.

    Raises `LocalError` HP-DATA-011 if the model lets tokens through between them.
    """
    tokens, labels, shift = (IDS, LABELS, 0) if IDS in example else (TOKENS, TARGETS, 1)
    ids = example[tokens]
    length = ids.shape[1]
    begin = length // 2
    if begin < 2:
        return
    targets = np.concatenate([ids[:, shift:], ids[:, :shift]], axis=1)
    targets[:, : begin + 1 - shift] = IGNORED
    places = np.concatenate([np.arange(begin), np.arange(length - begin)])
    first = {**example, labels: targets, POSITIONS: np.broadcast_to(places, ids.shape).copy()}
    other = ids.copy()
    other[:, :begin] = np.flip(ids)[:, :begin]
    other[:, 0] = np.where(other[:, 0] == ids[:, 0], ids[:, -1], other[:, 0])
    losses = [_loss(model, {**first, tokens: each}) for each in (ids, other)]
    if not abs(losses[0] - losses[1]) <= TOLERANCE * (1 + abs(losses[0])):
        raise not_apart(
            f"the loss of a document is {losses[0]:.6g} behind one other document and {losses[1]:.6g} "
            "behind another"
        )


def check_extremes(model: nn.Module, example: Arrays, extremes: Mapping[str, list[Extreme]]) -> None:
    """Raises `LocalError` HP-DATA-010 if the model fails on the smallest or largest number of an array.

    `extremes`: array → its smallest and largest numbers, each with the sample that has it.
    """
    for name, found in extremes.items():
        for extreme in found:
            batch = {key: array.copy() for key, array in example.items()}
            for key, value in extreme.sample.items():
                batch[key][0] = value
            why = _failure(model, example, batch)
            if why:
                low, high = min(each.value for each in found), max(each.value for each in found)
                raise LocalError(
                    "HP-DATA-010",
                    f"the model cannot compute a sample in which {name!r} has the value {extreme.value}",
                    why=f"{name!r} goes from {low} to {high} in this data: {why}",
                    fix="mend the data, or give the model so many classes or rows in its tables",
                    exit_code=ExitCode.CONFIG,
                )


def check_positions(model: nn.Module, length: int) -> None:
    """Raises `LocalError` HP-DATA-010 if samples of `length` tokens are longer than a model's position table.

    `model`: one of transformers, or any other, of which nothing is known. Rotary positions have no table.
    """
    from torch import nn

    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int) or length <= most:
        return
    words: Any = getattr(model, "get_input_embeddings", lambda: None)
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding) and part is not words())
    if any(most <= part.num_embeddings <= most + PADDING_ROWS for part in tables):
        raise LocalError(
            "HP-DATA-010",
            f"samples of {length} tokens are too long for the model",
            why=f"it has a table of {most} positions",
            fix=f"give --sequence-length {most}, or less",
            exit_code=ExitCode.CONFIG,
        )


def not_apart(why: str) -> LocalError:
    """HP-DATA-011."""
    return LocalError(
        "HP-DATA-011",
        "the model does not keep packed documents apart",
        why=why,
        fix="leave --packed out, or let attention respect position_ids, which begin at 0 with each document "
        "(a model of transformers does with use_cache=False in its config)",
        exit_code=ExitCode.CONFIG,
    )


def _is_finite(model: nn.Module, batch: Arrays) -> bool:
    """Whether the loss of `batch` is finite; True if the model fails: the trace says why."""
    try:
        return math.isfinite(_loss(model, batch))
    except Exception:  # noqa: BLE001 - the author's code may raise anything
        return True


def _failure(model: nn.Module, example: Arrays, batch: Arrays) -> str:
    """The model's error on `batch`; empty if there is none, or if `example` fails as well."""
    from hetpeer.stages.tracing.capture import torch_line

    try:
        _loss(model, batch)
    except Exception as error:  # noqa: BLE001 - the author's code may raise anything
        try:
            _loss(model, example)
        except Exception:  # noqa: BLE001
            return ""
        return f"{type(error).__name__}: {torch_line(error)}"
    return ""


def _loss(model: nn.Module, batch: Arrays) -> float:
    """Loss of a batch without dropout; the model's buffers and mode stay as they are."""
    import torch

    from hetpeer.bootstrap.model_checks.module_mode import mode_kept

    with mode_kept(model, training=False), torch.no_grad():
        loss: float = model(**{name: torch.from_numpy(array) for name, array in batch.items()}).item()
    return loss
