"""Samples of texts with a label each: a class, or the text that is the answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hetpeer.bootstrap.samples.packing import IDS, LABELS, MASK
from hetpeer.bootstrap.samples.record import Record, bad_record, unicode_text
from hetpeer.bootstrap.samples.tokenizer import Tokenizer
from hetpeer.stages.data.extremes import IGNORED
from hetpeer.stages.data.shards import Array, Arrays

TOGETHER = 256
"""Records that are tokenized at once."""

Labels = Callable[[list[Record]], Iterable[Array]]
"""Records → the array `labels` of each."""


def labelled(found: Iterable[Record], tokenizer: Tokenizer, length: int, labels: Labels) -> Iterator[Arrays]:
    """One sample for each record: its text, cut to `length` tokens or padded, and its label.

    Raises `LocalError` HP-DATA-008 for a record whose content is no text.
    """
    records = iter(found)
    while some := [*itertools.islice(records, TOGETHER)]:
        texts = [_text(record, record.content, "text") for record in some]
        for ids, label in zip(tokenizer.whole(texts, length), labels(some), strict=True):
            yield {**_padded(ids, length, tokenizer.pad), LABELS: label}


def classes(names: Mapping[str, int]) -> Labels:
    """Labels that are classes: numbers, or those of the model's `names`; int64 []."""

    def of(records: list[Record]) -> Iterator[Array]:
        for record in records:
            label = record.label
            if isinstance(label, str):
                label = names.get(label, int(label) if label.strip().isdecimal() else label)
            if not isinstance(label, int):
                known = ", ".join(itertools.islice(names, 8))
                raise bad_record(
                    record.where,
                    f"its label {str(label)[:40]!r} is no class",
                    f"write classes as numbers from 0, or as the model names them: {known}",
                )
            yield np.array(label, dtype=np.int64)

    return of


def answers(tokenizer: Tokenizer, length: int) -> Labels:
    """Labels that are texts: their ids, and -100 behind them; int64 [length]."""

    def of(records: list[Record]) -> Iterator[Array]:
        texts = [_text(record, record.label, "label") for record in records]
        for ids in tokenizer.whole(texts, length):
            labels = np.full(length, IGNORED)
            labels[: len(ids)] = ids
            yield labels

    return of


def _text(record: Record, content: Any, what: str) -> str:
    if not isinstance(content, str) or not content:
        kind = "empty" if content == "" else f"a value of type {type(content).__name__}"
        raise bad_record(record.where, f"its {what} is {kind}, and no text")
    return unicode_text(record.where, content)


def _padded(ids: list[int], length: int, pad: int) -> Arrays:
    """`input_ids` and `attention_mask`, int64 [length]."""
    mask = (np.arange(length) < len(ids)).astype(np.int64)
    filled = np.full(length, pad)
    filled[: len(ids)] = ids
    return {IDS: filled, MASK: mask}
