"""Documents to samples of one length: each padded, or several packed into one with borders between them.

Ids beyond a sample's documents are padding. A label that is no target is -100, which torch's cross entropy
ignores. Labels stand where their token stands; `shifted` moves them one to the left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetpeer.bootstrap.samples.tokenizer import Document
from hetpeer.stages.data.extremes import IGNORED
from hetpeer.stages.data.shards import TARGETS, TOKENS, Array, Arrays

OPEN = 32
"""Samples that wait for a document that fits into their rest."""
IDS, LABELS, MASK, POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"
"""Names of transformers' arrays."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document that fits into a sample: ids and labels, int64 [n]. Its first label is ignored."""

    ids: Array
    labels: Array


def pieces(documents: Iterable[Document], length: int) -> Iterator[Piece]:
    """Documents cut into pieces of at most `length` tokens; pieces without a target are left out."""
    for document in documents:
        ids = np.asarray(document.ids, dtype=np.int64)
        labels = ids if document.learned is None else np.where(document.learned, ids, IGNORED)
        for begin in range(0, len(ids), length):
            part = labels[begin : begin + length].copy()
            part[0] = IGNORED
            if (part != IGNORED).any():
                yield Piece(ids[begin : begin + length], part)


def padded(parts: Iterable[Piece], length: int, pad: int) -> Iterator[Arrays]:
    """One sample for each piece; `attention_mask` is 1 where a token stands, and 0 behind it."""
    for part in parts:
        mask = np.zeros(length, dtype=np.int64)
        mask[: len(part.ids)] = 1
        yield {**_filled([part], length, pad), MASK: mask}


def packed(parts: Iterable[Piece], length: int, pad: int) -> Iterator[Arrays]:
    """Samples of several pieces each; `position_ids` begin at 0 with every piece, and with the padding.

    A piece goes where it leaves the least room, of at most OPEN samples. The fullest one goes out first.
    """
    waiting: list[list[Piece]] = []
    rooms: list[int] = []
    for part in parts:
        size = len(part.ids)
        fitting = [number for number, room in enumerate(rooms) if room >= size]
        if fitting:
            best = min(fitting, key=lambda number: rooms[number])
            waiting[best].append(part)
            rooms[best] -= size
        else:
            if len(waiting) == OPEN:
                yield _joined(_fullest(waiting, rooms), length, pad)
            waiting.append([part])
            rooms.append(length - size)
        while 0 in rooms:
            yield _joined(_fullest(waiting, rooms), length, pad)
    for parts_of_one in waiting:
        yield _joined(parts_of_one, length, pad)


def shifted(sample: Arrays) -> Arrays:
    """The sample for a model that takes `tokens` and `targets`: the target of a token is the next one."""
    others = {name: array for name, array in sample.items() if name not in (IDS, LABELS)}
    targets = np.append(sample[LABELS][1:], IGNORED)
    return {TOKENS: sample[IDS], TARGETS: targets, **others}


def _fullest(waiting: list[list[Piece]], rooms: list[int]) -> list[Piece]:
    """Take the sample with the least room out of both lists."""
    number = rooms.index(min(rooms))
    del rooms[number]
    return waiting.pop(number)


def _joined(parts: Sequence[Piece], length: int, pad: int) -> Arrays:
    sizes = [len(part.ids) for part in parts]
    positions = [np.arange(size) for size in (*sizes, length - sum(sizes))]
    return {**_filled(parts, length, pad), POSITIONS: np.concatenate(positions)}


def _filled(parts: Sequence[Piece], length: int, pad: int) -> Arrays:
    room = length - sum(len(part.ids) for part in parts)
    return {
        IDS: np.concatenate([*(part.ids for part in parts), np.full(room, pad)]),
        LABELS: np.concatenate([*(part.labels for part in parts), np.full(room, IGNORED)]),
    }
