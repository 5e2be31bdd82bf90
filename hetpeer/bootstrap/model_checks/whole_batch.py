"""Comparison of a whole batch with its microbatches, by the author's module on the author's machine.

A run computes microbatches and adds their gradients up by their weights. That is the gradient of the whole
batch unless samples act on each other: negatives within the batch, a balance of experts, a loss that divides
by something else than its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hetpeer.bootstrap.model_checks.drawn_dropout import BERNOULLI, DISTRIBUTIONS
from hetpeer.bootstrap.model_checks.module_mode import mode_kept
from hetpeer.bootstrap.model_checks.two_norm import two_norm
from hetpeer.stages.data.sample_weights import Weights, share
from hetpeer.stages.data.shards import Arrays

MOST = 4
"""Microbatches that are compared with one batch of them."""
NEAR = 1e-3
"""Largest difference of losses (plus 1) and of gradients (of their norm) that rounding explains."""
BatchNorm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 (torch has no public name for it)


class _SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """While active, all draws are alike: nothing is dropped, and noise is one number."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return (
            result.fill_(1 if func is BERNOULLI else 0.5) if func in (BERNOULLI, *DISTRIBUTIONS) else result
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A batch computed at once, and as the weighted sum of its microbatches."""

    samples: int
    whole: float
    """Loss of the batch."""
    parts: float
    """Weighted mean of the microbatches' losses."""
    difference: float
    """2-norm of the difference of the two gradients, relative to that of the batch."""

    @property
    def is_same(self) -> bool:
        """Whether the two are equal but for rounding."""
        return abs(self.parts - self.whole) <= NEAR * (abs(self.whole) + 1) and self.difference <= NEAR

    def __str__(self) -> str:
        return (
            f"samples of a batch act on each other: {self.samples} at once have the loss {self.whole:.6g}, "
            f"in microbatches {self.parts:.6g}, and the gradients differ by {self.difference:.1%}. The run "
            "trains the latter: choose the largest --microbatch-size that fits"
        )


def small_last_part(model: nn.Module, sizes: Sequence[int]) -> str:
    """Warning that BatchNorm sees fewer samples in the last microbatch of a step; empty if it does not.

    `sizes`: samples of each microbatch.
    """
    if sizes[-1] == sizes[0] or not any(isinstance(module, BatchNorm) for module in model.modules()):
        return ""
    return (
        f"the model has BatchNorm, and the last microbatch of a step has {sizes[-1]} samples instead of "
        f"{sizes[0]}, so its statistics are others: choose a --batch-size that is a multiple of "
        "--microbatch-size"
    )


def compare_split(model: nn.Module, batch: Arrays, size: int, weights: Weights) -> Split | None:
    """Loss and gradient of `batch` at once, and of its microbatches of `size` samples by their `weights`.

    BatchNorm uses its running values and nothing is dropped, so that neither decides. None: there is only one
    microbatch, nothing counts, or the loss is not finite. Takes two passes, and memory for `batch`.
    """
    samples = len(weights)
    cuts = [slice(begin, min(begin + size, samples)) for begin in range(0, samples, size)]
    parts = [float(weights[cut].sum(dtype="float64")) for cut in cuts]
    if len(cuts) < 2 or not any(parts):
        return None
    data = {name: torch.from_numpy(array) for name, array in batch.items()}
    counted = [number for number, weight in enumerate(parts) if weight]
    shares = [
        ({name: tensor[cuts[number]] for name, tensor in data.items()}, share(parts, number))
        for number in counted
    ]
    with mode_kept(model, training=True):
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        try:
            whole, gradient = _computed(model, [(data, 1.0)])
            split, summed = _computed(model, shares)
        except Exception:  # noqa: BLE001 - the author's code may raise anything; the trace says what is wrong
            return None
    if not math.isfinite(whole + split):
        return None
    norm = two_norm(gradient.values())
    apart = two_norm(gradient[name] - summed[name] for name in gradient)
    return Split(samples=samples, whole=whole, parts=split, difference=apart / max(norm, 1e-30))


def _computed(
    model: nn.Module, parts: Sequence[tuple[Mapping[str, Tensor], float]]
) -> tuple[float, dict[str, Tensor]]:
    """Sum of the losses of `parts` by their shares, and its gradient by parameter."""
    loss = 0.0
    model.zero_grad()
    try:
        for data, of_all in parts:
            with _SameDraws():  # type: ignore[no-untyped-call]
                part = model(**data) * of_all
                part.backward()
            loss += part.item()
        found = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
    finally:
        model.zero_grad()
    return loss, found
