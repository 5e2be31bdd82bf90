"""The author's eager module with the parameter delays of a run whose steps overlap (docs/asynchronous.md)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class DelayedParameters:
    """A module's parameters as they were some updates ago.

    `behind` gives the delay of each step, in updates. Microbatches before `early` (None: all) use the delayed
    parameters. `bounds`: name of a parameter → its largest delay, which may be less than the step's.
    """

    def __init__(
        self,
        module: nn.Module,
        behind: Sequence[int],
        early: int | None = None,
        bounds: Mapping[str, int] | None = None,
    ) -> None:
        self._weights = [*module.parameters()]
        bounds, names = bounds or {}, [name for name, _ in module.named_parameters()]
        assert bounds.keys() <= {*names}, bounds.keys() - {*names}
        self._bounds = [bounds.get(name, max(behind, default=0)) for name in names]
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
        parts = [version.split([weight.numel() for weight in self._weights]) for version in self._versions]
        each = [parts[-1 - min(behind, most)][n] for n, most in enumerate(self._bounds)]
        self._base = torch.cat(each)
        vector_to_parameters(self._base.clone(), self._weights)

    def forth(self, compensation: float = 0.0) -> None:
        """Restore the newest parameters; clipped gradients become g + λ g² (w - w_base) (DC-ASGD, Eq. 10)."""
        newest = self._versions[-1]
        vector_to_parameters(newest.clone(), self._weights)
        changes = torch.split(newest - self._base, [weight.numel() for weight in self._weights])
        for weight, change in zip(self._weights, changes, strict=True):
            if compensation and weight.grad is not None:
                weight.grad += compensation * weight.grad**2 * change.view_as(weight)
