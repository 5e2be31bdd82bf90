"""Flat vectors in the arena: sums, fingerprints, digests and norms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from blake3 import blake3

from hetpeer.stages.block.exact_numerics import is_finite, squared_norm
from hetpeer.stages.block.fingerprint import PLACES, fingerprint, pack
from hetpeer.stages.block.robust_mean import centered_clip
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.worker.tensor_staging import CommandError, Staging

Round = Callable[[v.Rounding, torch.Tensor, Extent], torch.Tensor | None]


class VectorSums:
    """Commands on vectors in `staging`. `round_` encodes a vector and returns the decoded values, or None."""

    def __init__(self, staging: Staging, round_: Round) -> None:
        self._staging = staging
        self._round = round_

    def add(self, command: v.SumVectors) -> r.Summed:
        """Carry out `SumVectors`."""
        if command.into in command.parts:
            raise CommandError("a sum would overwrite one of its parts")
        into = self._staging.floats(command.into, command.elements)
        parts = [self._staging.floats(part, command.elements) for part in command.parts]
        marks = tuple(mark(part, command.begin, how) for part in parts for how in command.markings)
        if command.robust:
            into.copy_(centered_clip(parts))
        else:
            into.copy_(parts[0])
            for part in parts[1:]:
                into.add_(part)
        sound = is_finite(into)
        if not sound:
            wrong = tuple(n for n, part in enumerate(parts) if not is_finite(part))
            return r.Summed(unsound=wrong, marks=marks)
        read = None
        if command.rounding is not None and command.rounded is not None:
            read = self._round(command.rounding, into, command.rounded)
        if read is not None:
            into.copy_(read)
        return r.Summed(unsound=(), rounded=read is not None, marks=marks)

    def mark(self, command: v.MarkVector) -> r.Marked:
        """Carry out `MarkVector`."""
        how, begin, total = command.marking, command.begin, np.zeros(PLACES)
        for extent in command.pieces:
            piece = self._all(extent)
            first, last = max(how.begin, begin), min(how.end, begin + len(piece))
            if first < last:
                total += fingerprint(piece[first - begin : last - begin].numpy(), how.block, first, how.key)
            begin += len(piece)
        _among(how, command.begin, begin)
        return r.Marked(marks=pack(total))

    def inspect(self, command: v.InspectVector) -> r.Inspected:
        """Carry out `InspectVector`."""
        started = time.perf_counter()
        vector = self._staging.floats(command.extent, command.elements)
        norm = math.fsum(squared_norm(vector[begin:end]) for begin, end in command.normed)
        digest, finite = _look(vector)
        return r.Inspected(
            digest=digest,
            squared_norm=norm,
            finite=finite,
            pieces=tuple(_look(self._all(piece)) for piece in command.pieces),
            seconds=time.perf_counter() - started,
        )

    def _all(self, extent: Extent) -> torch.Tensor:
        return self._staging.floats(extent, extent.nbytes // torch.float32.itemsize)


def mark(vector: torch.Tensor, begin: int, how: v.Marking) -> bytes:
    """The fingerprint of the elements named by `how` in `vector`, whose first one is element `begin` of its
    block.
    """
    _among(how, begin, begin + len(vector))
    part = vector[how.begin - begin : how.end - begin]
    return pack(fingerprint(part.cpu().numpy(), how.block, how.begin, how.key))


def _among(how: v.Marking, begin: int, end: int) -> None:
    if not begin <= how.begin <= how.end <= end:
        raise CommandError(f"elements [{how.begin}, {how.end}) are not among [{begin}, {end})")


def _look(vector: torch.Tensor) -> tuple[str, bool]:
    """(blake3 digest of its bytes, whether all values are finite)."""
    return blake3(vector.numpy().data.cast("B")).hexdigest(), is_finite(vector)
