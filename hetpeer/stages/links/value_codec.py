"""The interface of a value codec: floating-point values in fewer bytes.

Planners, checks and the daemon have no torch and need a codec's sizes, so a codec's module imports torch in
functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ValueCodec(ABC):
    """An encoding of float32 values. It has no state. Registered in value_codecs.py (docs/extending.md).

    The bytes of a piece depend on its values alone, on every device: holders compare them, and what a sender
    lost (error feedback) is what the receiver does not get.
    """

    name: ClassVar[str]
    """Name in manifests and frames: letters and digits."""
    tolerance: ClassVar[float]
    """Largest distance of two honest volunteers' sums if they send by this codec, relative to their length.
    For comparison: the opposite of a sum is 2 away, noise 1.4.
    """
    gentler: ClassVar[tuple[str, ...]] = ()
    """Codecs that a link tries first on its way to this one, the gentlest first (adaptive_ratio.py)."""
    with_top_k: ClassVar[bool] = True
    """Whether `topk-` may stand before its name: only the largest elements are sent, by this codec."""
    squeezable: ClassVar[bool] = False
    """Whether zstd makes its bytes shorter by more than it costs on a slow line."""
    of_movements: ClassVar[bool] = False
    """Whether it is for what clusters have moved since they last averaged, and for nothing else."""
    repeatable: ClassVar[bool] = True
    """Whether two volunteers that compute the same send nearly the same: spot checks need that."""

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes of `count` values. It depends on nothing else: receivers check lengths before they read."""

    @abstractmethod
    def encode(self, flat: Tensor, target: memoryview) -> None:
        """Write a finite 1-D float32 tensor, on any device, to `target`, of `nbytes` bytes.

        Raises LocalError HP-NUM-002 for a value that it cannot represent: the tensor is then sent unchanged.
        """

    @abstractmethod
    def decode(self, data: memoryview, count: int) -> Tensor:
        """`count` float32 values on the CPU from `nbytes` bytes, which a stranger may have written.

        Memory and time are bounded by `count`. The caller refuses values that are not finite.
        """


def values_at(data: Any, dtype: torch.dtype) -> Tensor:
    """The 1-D tensor whose memory is `data`."""
    import torch

    return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
