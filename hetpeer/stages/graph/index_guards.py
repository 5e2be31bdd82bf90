"""Indices that are checked before a GPU's kernel reads them.

A CPU's kernel refuses an index beyond its table. A GPU's kernel breaks the GPU's context instead: the worker
ends, and nobody hears which microbatch it was. So on GPUs these operators' indices are looked at first; that
waits for the GPU, as the check of each bundle does anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Guard = Callable[..., None]
"""Takes the operator's arguments. Raises IndexError if an index is beyond what it points into."""


def _within(indices: Tensor, size: int, least: int = 0) -> None:
    if indices.numel():
        low, high = (int(end) for end in torch.aminmax(indices))
        if low < least or high >= size:
            raise IndexError(f"index {low if low < least else high} is out of bounds for {size}")


def _embedding(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> None:
    _within(indices, weight.shape[0])


def _along(x: Tensor, dim: int, indices: Tensor, *_: Any, **__: Any) -> None:
    _within(indices, x.shape[dim])


def _take(x: Tensor, indices: Tensor, dim: int | None = None) -> None:
    if dim is None:  # else torch itself wraps them around
        _within(indices, x.numel())


def _index(x: Tensor, indices: Sequence[Tensor | None], *_: Any, **__: Any) -> None:
    dim = 0
    for one in indices:
        if one is None or one.dtype not in (torch.bool, torch.uint8):
            if one is not None:
                _within(one, x.shape[dim], -x.shape[dim])
            dim += 1
        else:
            dim += one.dim()


def _one_hot(x: Tensor, classes: int) -> None:
    _within(x, classes)


def _classes(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,  # noqa: ARG001
    reduction: int = 1,  # noqa: ARG001
    ignored: int = -100,
    *_: Any,
) -> None:
    if not target.is_floating_point():  # else it has probabilities
        _within(target.where(target != ignored, 0), x.shape[0] if x.dim() == 1 else x.shape[1])


INDEX_GUARDS: Mapping[str, Guard] = {
    "aten.embedding.default": _embedding,
    "aten.index_select.default": _along,
    "aten.gather.default": _along,
    "aten.index_add.default": _along,
    "aten.index_copy.default": _along,
    "aten.index_fill.int_Scalar": _along,
    "aten.scatter.src": _along,
    "aten.scatter.value": _along,
    "aten.scatter_add.default": _along,
    "aten.scatter_reduce.two": _along,
    "aten.take_along_dim.default": _take,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index,
    "aten.one_hot.default": _one_hot,
    "aten.cross_entropy_loss.default": _classes,
    "aten.nll_loss_nd.default": _classes,
}
"""Operator → check of its indices."""
