"""The codec `topk2`: the few largest elements of a movement, each with a sign and one of two sizes.

For averagings: what a cluster's parameters have moved since the last one (docs/averaging.md, "Sparse outer
updates"). Source: SparseLoCo (Sarfi et al., 2025), whose chunks of 4,096 and two bits these are.

A window is 4,096 elements. Of each the KEPT largest by absolute value are kept (of equal ones the first), but
no zeros. Its bytes (sparse_windows.py) are as many whatever is in it. numpy and torch are imported in
functions only, as by all codecs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hetpeer.stages.links.value_codec import ValueCodec

if TYPE_CHECKING:
    from torch import Tensor

PLACES: Final = 12
"""Bits of a position in a window."""
WINDOW: Final = 1 << PLACES
KEPT: Final = 48
"""Elements of a window that are kept: 1.2 %."""
WINDOW_BYTES: Final = 70
"""0.137 bits an element."""


class TopK2(ValueCodec):
    """Four values for the largest elements, and zero for all others: the rest is the sender's residual."""

    name = "topk2"
    tolerance = 1.0
    with_top_k = False
    repeatable = False
    of_movements = True

    def nbytes(self, count: int) -> int:
        return -(-count // WINDOW) * WINDOW_BYTES

    def encode(self, flat: Tensor, target: memoryview) -> None:
        from hetpeer.stages.links.sparse_windows import write_windows

        write_windows(flat.detach().cpu().numpy(), target)

    def decode(self, data: memoryview, count: int) -> Tensor:
        import torch

        from hetpeer.stages.links.sparse_windows import read_windows

        return torch.from_numpy(read_windows(data[: self.nbytes(count)], count))
