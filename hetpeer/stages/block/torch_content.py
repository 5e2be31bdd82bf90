"""Tensors of torch as the content of a file (tensor_file.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetpeer.stages.graph.block_spec import SAFETENSORS
from hetpeer.stages.graph.interpreter import SYMBOLS

_NAMES = {SYMBOLS["dtype"][name]: stored for name, stored in SAFETENSORS.items()} | {torch.complex64: "C64"}


class TorchContent:
    """`tensor` in main memory, written as `dtype` if it is a floating-point tensor; None: as it is.

    Only the tensor that is being written is converted or made contiguous.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        self._tensor = tensor
        self._as = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        self.dtype = _NAMES[self._as]
        self.shape = tuple(tensor.shape)

    def data(self) -> Any:
        """A buffer with its elements."""
        return self._tensor.detach().to(self._as).reshape(-1).view(torch.uint8).numpy()
