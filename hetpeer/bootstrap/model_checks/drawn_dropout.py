"""The run's random draws in the author's eager module: dropout masks, drop path, noise.

On a CPU every dropout of torch, also inside attention, asks for its mask by one in-place operator. Here that
operator gets the run's mask, and so do the other draws that blocks know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetpeer.stages.operators import random_draws
from hetpeer.stages.operators.random_draws import Draw, keep_mask

aten: Any = torch.ops.aten
BERNOULLI = aten.bernoulli_.float
DISTRIBUTIONS: Mapping[Any, Callable[[Draw, int, int], Any]] = {
    aten.rand.default: random_draws.uniform,
    aten.rand_like.default: random_draws.uniform,
    aten.uniform_.default: random_draws.uniform,
    aten.randn.default: random_draws.normal,
    aten.randn_like.default: random_draws.normal,
    aten.normal_.default: random_draws.normal,
    aten.exponential_.default: random_draws.exponential,
}
"""Draw of torch with its usual bounds → the run's own numbers for it."""


class DrawnDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """While active, the n-th draw of a forward (dropout, drop path) takes the numbers of draw n.

    If active in the backward too, a dropout recomputed there (torch's checkpoint) gets its own mask again.
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw
        self._operators: dict[bytes, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not BERNOULLI and func not in DISTRIBUTIONS:
            return func(*args, **kwargs)
        # A checkpoint restores the generator's state before it recomputes: the state identifies the draw.
        state = torch.get_rng_state().numpy().tobytes()
        operator = self._operators.setdefault(state, len(self._operators))
        torch.rand(())  # so that the next draw finds another state
        result = func(*args, **kwargs)
        if func is BERNOULLI:
            keep = args[1] if len(args) > 1 else 0.5  # torch leaves a default out
            drawn: Any = keep_mask(self._draw, operator, 1.0 - keep, result.numel())
        else:
            drawn = DISTRIBUTIONS[func](self._draw, operator, result.numel())
        return result.copy_(torch.from_numpy(drawn).view(result.shape))
