"""What the author's own eager module needs to compute what a swarm did, on one machine: the run's dropout, and the run's delays.

Nothing of the engine is used. On a CPU every dropout of torch, those inside attention too, asks for its mask by one
in-place operator, and here the mask is the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode

from hetpeer.stages.graph.random_draws import Draw, keep_mask


class DrawnDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """While active, the n-th dropout of a forward pass that drops anything takes the mask of operator n of `draw`.

    Active in the backward pass, too, it gives a dropout that is computed again there (torch's checkpoint) its own mask once more.
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
        # A checkpoint puts the generator's state back before it computes again: a state tells which dropout this is.
        state = torch.get_rng_state().numpy().tobytes()
        operator = self._operators.setdefault(state, len(self._operators))
        torch.rand(())  # the next one finds another state
        mask = keep_mask(self._draw, operator, 1.0 - keep, noise.numel())
        return noise.copy_(torch.from_numpy(mask).view(noise.shape))


class Delayed:
    """A module's parameters as they were some updates ago, in each step so many as `behind` says: what its microbatches before `early` (None: all) are
    computed with where steps overlap (docs/asynchronous.md).
    """

    def __init__(self, module: nn.Module, behind: Sequence[int], early: int | None = None) -> None:
        self._weights = [*module.parameters()]
        self._most, self._early = max(behind, default=0), early
        self._versions: list[Tensor] = []

    def back(self, behind: int, microbatch: int) -> None:
        """`microbatch` of a step, from 0 on, is next; the step begins with the parameters before the last `behind` updates."""
        if microbatch == self._early:
            self.forth()
        if microbatch:
            return
        now = parameters_to_vector(self._weights).detach().clone()
        self._versions = [*self._versions, now][-1 - self._most :]
        self._base = self._versions[-1 - behind]
        vector_to_parameters(self._base.clone(), self._weights)

    def forth(self, compensation: float = 0.0) -> None:
        """The newest parameters are back, and the clipped gradients compensated for what has changed: g + λ g² (w - w_base), DC-ASGD, Eq. 10."""
        newest = self._versions[-1]
        vector_to_parameters(newest.clone(), self._weights)
        changes = torch.split(newest - self._base, [weight.numel() for weight in self._weights])
        for weight, change in zip(self._weights, changes, strict=True):
            if compensation and weight.grad is not None:
                weight.grad += compensation * weight.grad**2 * change.view_as(weight)
