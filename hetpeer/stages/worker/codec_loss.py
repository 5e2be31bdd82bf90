"""What a codec takes from the vectors that a block reduces, and what becomes of it.

A reduce that is sent in fewer bytes rounds twice: parts on their way to the reducer, sums on their way back. What is lost is added to
the next ones (error feedback in both passes: DoubleSqueeze, Tang et al., ICML 2019). It is settled by the plan that was committed:
what another plan of the same step has rounded is forgotten. Docs: averaging.md, "Fewer bytes".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.block.exact_numerics import is_finite
from hetpeer.stages.links.codec import Codec, Written, value_bytes
from hetpeer.stages.links.tensor_codecs import decode, encode


@dataclass(slots=True)
class _Loss:
    """What one vector has lost, in the units of its mean."""

    carried: Tensor | None = None
    """In reduces that count: it is to be added to the next."""
    pending: Tensor | None = None
    plan: int = 0
    """Of which `pending` is."""


class Losses:
    """Of one block: GRADIENTS and PARAMETERS, parts and sums. Vectors have `count` elements; all of one name are on one device."""

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
        """Write a piece of a float32 vector, from element `begin` on, to the beginning of `into`, and what it has lost earlier with it.

        Returns what the receiver will read, on the CPU; None where the codec cannot write it (not finite, beyond fp16): it is to be
        sent as it is. `piece` is the sum of so many `parts`. What is lost is kept if there is a `name`.
        """
        values = codec.values
        assert values is not None
        loss = self._losses.setdefault(name, _Loss()) if name else _Loss()
        here = slice(begin, begin + len(piece))
        if loss.carried is not None:
            piece = piece + loss.carried[here] * parts
        if not is_finite(piece):
            return None
        data = into[: value_bytes(values, len(piece))]
        try:
            encode(codec, piece, len(piece), data)
        except LocalError:
            return None
        read = torch.empty(len(piece))
        decode(codec, Written(len(piece)), data, read)
        if name:
            if loss.pending is None or loss.plan != plan:
                loss.pending, loss.plan = piece.new_zeros(self._count), plan
            loss.pending[here] = (piece - read.to(piece.device)) / parts
        return read

    def lost(self, name: str, plan: int) -> Tensor | None:
        """What the vector `name` has lost under `plan`; None: nothing."""
        loss = self._losses.get(name)
        return loss.pending if loss is not None and loss.plan == plan else None

    def settle(self, *names: str, plan: int) -> None:
        """`plan` counts: what was lost under it is added to the next vectors of these names."""
        for name in names:
            lost = self.lost(name, plan)
            if lost is not None:
                self._losses[name].carried = lost
        self.drop(*names)

    def drop(self, *names: str) -> None:
        """What is not settled never was."""
        for name in names:
            if name in self._losses:
                self._losses[name].pending = None
