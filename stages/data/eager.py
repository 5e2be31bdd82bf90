"""Dropout of the author's own eager module, drawn as the run draws it: how one machine can compute what a swarm did.

Nothing of the engine is used: on a CPU every dropout of torch, those inside attention too, asks for its mask by one
in-place operator, and here the mask is the run's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetpeer.stages.data.draws import Draw, keep_mask


class DrawnDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """While active, the n-th dropout of a forward pass that drops anything takes the mask of operator n of `draw`."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw
        self._operator = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        noise, keep = args[:2]
        mask = keep_mask(self._draw, self._operator, 1.0 - keep, noise.numel())
        self._operator += 1
        return noise.copy_(torch.from_numpy(mask).view(noise.shape))
