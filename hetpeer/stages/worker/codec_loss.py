"""Rounding errors of a codec on the vectors that a block reduces, and error feedback.

A reduce in fewer bytes rounds twice: parts on their way to the reducer, sums on their way back. The errors
are added to the next vectors (error feedback in both passes: DoubleSqueeze, Tang et al., ICML 2019). They
count for the committed reduce plan; errors under other plans of the step are forgotten. Docs: averaging.md,
"Fewer bytes".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.block.exact_numerics import is_finite
from hetpeer.stages.links.codec import Codec, EncodedTensor
from hetpeer.stages.links.tensor_codecs import decode, encode


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
            encode(codec, piece, len(piece), data)
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
        """Forget errors that were not settled."""
        for name in names:
            if name in self._losses:
                self._losses[name].pending = None
