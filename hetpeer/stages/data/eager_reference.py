"""Reproducing a swarm's result with the author's eager module: the run's dropout masks and parameter delays.

It uses nothing of the engine. On a CPU every dropout of torch, also inside attention, asks for its mask by
one in-place operator, and here the mask is the run's.
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


class DelayedParameters:
    """A module's parameters as they were some updates ago, where steps overlap (docs/asynchronous.md).

    `behind` gives the delay of each step, in updates. Microbatches before `early` (None: all) use the delayed
    parameters.
    """

    def __init__(self, module: nn.Module, behind: Sequence[int], early: int | None = None) -> None:
        self._weights = [*module.parameters()]
        self._most, self._early = max(behind, default=0), early
        self._versions: list[Tensor] = []

    def back(self, behind: int, microbatch: int) -> None:
        """Microbatch `microbatch` of a step is next; the step uses the parameters `behind` updates ago."""
        if microbatch == self._early:
            self.forth()
        if microbatch:
            return
        now = parameters_to_vector(self._weights).detach().clone()
        self._versions = [*self._versions, now][-1 - self._most :]
        self._base = self._versions[-1 - behind]
        vector_to_parameters(self._base.clone(), self._weights)

    def forth(self, compensation: float = 0.0) -> None:
        """Restore the newest parameters; clipped gradients become g + λ g² (w - w_base) (DC-ASGD, Eq. 10)."""
        newest = self._versions[-1]
        vector_to_parameters(newest.clone(), self._weights)
        changes = torch.split(newest - self._base, [weight.numel() for weight in self._weights])
        for weight, change in zip(self._weights, changes, strict=True):
            if compensation and weight.grad is not None:
                weight.grad += compensation * weight.grad**2 * change.view_as(weight)
