"""Flat vectors in the arena: sums, exact or robust, the rounding of a codec, fingerprints, digests and norms.

A reduce in fewer bytes rounds twice: parts on their way to the reducer, sums on their way back. The errors
are added to the next vectors (error feedback in both passes: DoubleSqueeze, Tang et al., ICML 2019). They
count for the committed reduce plan; errors under other plans of the step are forgotten. Docs: averaging.md,
"Fewer bytes".

The robust sum is centered clipping: a mean that a few parts cannot move far (Karimireddy, He and Jaggi, ICML
2021, algorithm 1). Every reducer can do it for its shard alone (Gorbunov et al., Secure distributed training
at scale, ICML 2022). Every iteration is a weighted mean of the parts, and the distances that decide the
weights follow from their inner products. So the vectors are read once for those, and once for the result.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.block.exact_numerics import LANES, SquaredNorm, is_finite
from hetpeer.stages.block.fingerprint import PLACES, fingerprint, pack
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.links.codec import Codec, EncodedTensor
from hetpeer.stages.links.tensor_codecs import decode, encode
from hetpeer.stages.worker.holding.stored_vector import InMemory, StoredVector
from hetpeer.stages.worker.movement_sums import summed_movements
from hetpeer.stages.worker.tensor_staging import CommandError, Staging

CPU = torch.device("cpu")
Round = Callable[[v.Rounding, torch.Tensor, Extent], torch.Tensor | None]
PIECE: Final = 1 << 16
"""Elements added up at a time, in a core's cache."""
Ranges = Sequence[tuple[int, int]]
"""Ranges [begin, end) of a vector."""


class VectorSums:
    """Commands on vectors in `staging`. `round_` encodes a vector and returns the decoded values, or None."""

    def __init__(self, staging: Staging, round_: Round) -> None:
        self._staging = staging
        self._round = round_

    def add(self, command: v.SumVectors) -> r.Summed:
        """Carry out `SumVectors`."""
        into = self._staging.floats(command.into, command.elements)
        parts = [self._staging.floats(part, command.elements) for part in command.parts]
        marks = tuple(mark(part, command.begin, how) for part in parts for how in command.markings)
        looks = tuple(map(_look, parts)) if command.closely else ()
        if command.robust:
            into.copy_(centered_clip(parts))
        else:
            for begin in range(0, len(into), PIECE):
                here = slice(begin, begin + PIECE)
                pieces = [part[here] for part in parts]  # `into` may be any of the parts
                into[here].copy_(summed_movements(pieces) if command.movements else added_up(pieces))
        sound = is_finite(into)
        if not sound:
            wrong = tuple(n for n, part in enumerate(parts) if not is_finite(part))
            return r.Summed(unsound=wrong, marks=marks)
        read = None
        if command.rounding is not None and command.rounded is not None:
            read = self._round(command.rounding, into, command.rounded)
        if read is not None:
            into.copy_(read)
        return r.Summed(unsound=(), rounded=read is not None, marks=marks, looks=looks)

    def mark(self, command: v.MarkVector) -> r.Marked:
        """Carry out `MarkVector`."""
        how, begin, total = command.marking, command.begin, np.zeros(PLACES)
        for extent in command.pieces:
            piece = self._all(extent)
            first, last = max(how.begin, begin), min(how.end, begin + len(piece))
            if first < last:
                total += fingerprint(piece[first - begin : last - begin].numpy(), how.block, first, how.key)
            begin += len(piece)
        among(how, command.begin, begin)
        return r.Marked(marks=pack(total))

    def inspect(self, command: v.InspectVector) -> r.Inspected:
        """Carry out `InspectVector`."""
        vector = InMemory(self._staging.floats(command.extent, command.elements))
        return inspect(vector, command.normed, command.groups, [self._all(piece) for piece in command.pieces])

    def _all(self, extent: Extent) -> torch.Tensor:
        return self._staging.floats(extent, extent.nbytes // torch.float32.itemsize)


def inspect(
    vector: StoredVector, normed: Ranges, groups: Sequence[Ranges], pieces: Sequence[torch.Tensor] = ()
) -> r.Inspected:
    """Digest, finiteness and norms of `vector`, and a look at each of `pieces` (1-D float32, on the CPU).

    `normed` and each of `groups` are the ranges that count for the norm, and for that of a group. The vector
    is read once, piece by piece: each is in a core's cache for all that is to be found of it.
    """
    started = time.perf_counter()
    hasher, finite = blake3(), True
    norms = [_RangesNorm(ranges) for ranges in (normed, *groups)]
    for begin in range(0, vector.count, LANES):
        end = min(begin + LANES, vector.count)
        piece = vector.piece(begin, end).cpu()
        hasher.update(piece.numpy().data.cast("B"))
        finite = finite and is_finite(piece)
        for norm in norms:
            norm.add(begin, piece)
    whole, *grouped = (norm.squared() for norm in norms)
    return r.Inspected(
        digest=hasher.hexdigest(),
        squared_norm=whole,
        finite=finite,
        pieces=tuple(map(_look, pieces)),
        group_squares=tuple(grouped),
        seconds=time.perf_counter() - started,
    )


class _RangesNorm:
    """The squared norm of some ranges of a vector that passes by; only one of them is being summed."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = deque(sorted(ranges))
        self._open: SquaredNorm | None = None
        self._squares: list[float] = []

    def add(self, begin: int, piece: torch.Tensor) -> None:
        """Take the vector's next elements, from `begin` on."""
        end = begin + len(piece)
        while self._ranges and self._ranges[0][0] < end:
            first, last = self._ranges[0]
            self._open = self._open or SquaredNorm(CPU)
            self._open.add(piece[max(first - begin, 0) : last - begin])
            if last > end:
                return
            self._squares.append(self._open.value())
            self._open = None
            self._ranges.popleft()

    def squared(self) -> float:
        """The sum of the ranges' squared norms."""
        return math.fsum(self._squares)


def added_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of 1-D float32 tensors, added one by one in order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def mark(vector: torch.Tensor, begin: int, how: v.Marking) -> bytes:
    """The fingerprint of the elements named by `how` in `vector`, from element `begin` of its block."""
    among(how, begin, begin + len(vector))
    part = vector[how.begin - begin : how.end - begin]
    return pack(fingerprint(part.cpu().numpy(), how.block, how.begin, how.key))


def among(how: v.Marking, begin: int, end: int) -> None:
    """Raise CommandError if the elements of `how` are not all among [begin, end)."""
    if not begin <= how.begin <= how.end <= end:
        raise CommandError(f"elements [{how.begin}, {how.end}) are not among [{begin}, {end})")


def _look(vector: torch.Tensor) -> tuple[str, bool]:
    """(blake3 digest of its bytes, whether all values are finite)."""
    return blake3(vector.numpy().data.cast("B")).hexdigest(), is_finite(vector)


@dataclass(slots=True)
class _Loss:
    """Rounding errors of one vector, in the units of its mean."""

    carried: Tensor | None = None
    """Errors of committed reduces, to be added to the next."""
    pending: Tensor | None = None
    plan: int = 0
    """The plan of `pending`."""


class CodecLosses:
    """Rounding errors of one block: GRADIENTS and PARAMETERS, of parts and of sums.

    Vectors have `count` elements; all vectors of one name are on one device.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._losses: dict[str, _Loss] = {}

    def round(
        self,
        codec: Codec,
        piece: Tensor,
        into: memoryview,
        *,
        name: str = "",
        plan: int = 0,
        begin: int = 0,
        parts: int = 1,
    ) -> Tensor | None:
        """Encode a piece of a float32 vector, from element `begin` on, plus its earlier errors, into the
        start of `into`.

        Returns the values that the receiver will read, on the CPU; None if the codec cannot write them (not
        finite, beyond fp16) and the piece must be sent as it is. `piece` is the sum of `parts` parts. The
        error is kept if there is a `name`.
        """
        values = codec.values
        assert values is not None
        loss = self._losses.setdefault(name, _Loss()) if name else _Loss()
        here = slice(begin, begin + len(piece))
        if loss.carried is not None:
            piece = piece + loss.carried[here] * parts
        if not is_finite(piece):
            return None
        data = into[: values.nbytes(len(piece))]
        try:
            encode(codec, piece, len(piece), data, squeeze=False)  # its length follows from the plan
        except LocalError:
            return None
        read = torch.empty(len(piece))
        decode(codec, EncodedTensor(len(piece)), data, read)
        if name:
            if loss.pending is None or loss.plan != plan:
                loss.pending, loss.plan = piece.new_zeros(self._count), plan
            loss.pending[here] = (piece - read.to(piece.device)) / parts
        return read

    def lost(self, name: str, plan: int) -> Tensor | None:
        """The errors of vector `name` under `plan`; None if there are none."""
        loss = self._losses.get(name)
        return loss.pending if loss is not None and loss.plan == plan else None

    def settle(self, *names: str, plan: int) -> None:
        """`plan` is committed: add its errors to the next vectors of these names."""
        for name in names:
            lost = self.lost(name, plan)
            if lost is not None:
                self._losses[name].carried = lost
        self.drop(*names)

    def drop(self, *names: str) -> None:
        """Forget the errors of these vectors that no committed plan has settled."""
        for name in names:
            if name in self._losses:
                self._losses[name].pending = None


ROUNDS: Final = 20
"""Iterations; the weights hardly change after that."""
CHUNK: Final = 1 << 15
"""Elements converted to float64 at a time."""

FEWEST: Final = 3
"""Least number of parts for clipping: with fewer, none is far from the others."""
PRECISION: Final = 1e-12
"""Relative precision of a squared distance, compared with the squares whose difference it is."""

Matrix = NDArray[np.float64]


def centered_clip(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The clipped mean of `parts` times their number, in place of their sum.

    `parts` are 1-D float32 tensors of one length, finite. It begins with the part nearest to most others and
    moves by the mean of the parts' differences, each clipped to the median length. So a minority moves it by
    no more than the distance between the others. For one or two parts it is the mean. One reducer computes it
    for everybody, so its bits may differ between machines.
    """
    weights = clipped(products(parts)) if len(parts) >= FEWEST else np.full(len(parts), 1.0 / len(parts))
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            total.add_(part, alpha=float(len(parts) * weight))
    return total


def products(parts: Sequence[torch.Tensor], origin: int = 0) -> Matrix:
    """Inner products of the differences between `parts` and one of them; these are small compared with the
    parts.

    If that part is so far away that nothing is left of the differences between the others, another one is
    taken.
    """
    found = np.zeros((len(parts), len(parts)))
    for begin in range(0, len(parts[0]), CHUNK):
        piece = torch.stack([part[begin : begin + CHUNK] for part in parts]).double()
        piece -= piece[origin].clone()
        found += (piece @ piece.T).numpy()
    middle, away = nearest(found)
    too_far = away**2 < PRECISION * found[middle, middle]
    return products(parts, middle) if too_far and not origin else found


def distances(inner: Matrix) -> Matrix:
    """Pairwise distances (N, N) of vectors with the inner products `inner` (N, N)."""
    squares = np.diag(inner)
    return np.asarray(np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2.0 * inner, 0.0)))


def nearest(inner: Matrix) -> tuple[int, float]:
    """(index of the part nearest to most others, its median distance from them)."""
    middle = np.median(distances(inner), axis=1)
    return int(np.argmin(middle)), float(np.min(middle))


def clipped(inner: Matrix) -> NDArray[np.float64]:
    """Weights in the clipped mean of vectors with these inner products; they add up to 1."""
    count, squares = len(inner), np.diag(inner)
    weights = np.zeros(count)
    weights[nearest(inner)[0]] = 1.0
    for _ in range(ROUNDS):
        lengths = np.sqrt(np.maximum(squares - 2.0 * inner @ weights + weights @ inner @ weights, 0.0))
        radius = np.median(lengths)
        shares = np.divide(radius, lengths, out=np.ones(count), where=lengths > radius) / count
        weights = weights * (1.0 - shares.sum()) + shares
    return weights
