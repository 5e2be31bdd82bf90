"""The run's dropout masks in the author's eager module.

On a CPU every dropout of torch, also inside attention, asks for its mask by one in-place operator. Here that
operator gets the run's mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetpeer.stages.graph.random_draws import Draw, keep_mask


class DrawnDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """While active, the n-th effective dropout of a forward takes the mask of operator n of `draw`.

    If active in the backward too, a dropout recomputed there (torch's checkpoint) gets its own mask again.
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw
        self._operators: dict[bytes, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        noise, keep = args[:2]
        # A checkpoint restores the generator's state before it recomputes: the state identifies the dropout.
        state = torch.get_rng_state().numpy().tobytes()
        operator = self._operators.setdefault(state, len(self._operators))
        torch.rand(())  # so that the next dropout finds another state
        mask = keep_mask(self._draw, operator, 1.0 - keep, noise.numel())
        return noise.copy_(torch.from_numpy(mask).view(noise.shape))
