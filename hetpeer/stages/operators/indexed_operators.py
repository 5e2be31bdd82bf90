"""Operators that group or scatter by the values of an index, and checks of indices.

A kernel that trusts such values reads or writes beyond its tensors. Grouped products check them here. A CPU's
kernel refuses an index beyond its table. A GPU's kernel breaks the GPU's context instead: the worker ends,
and nobody hears which microbatch it was. So on GPUs `INDEX_GUARDS` look at the indices first; that waits for
the GPU, as the check of each bundle does anyway. On tensors without memory only shapes are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetpeer.stages.operators.operator_family import Operator, aten, is_abstract

Guard = Callable[..., None]
"""Takes the operator's arguments. Raises IndexError if an index is beyond what it points into."""


def _within(indices: Tensor, size: int, least: int = 0) -> None:
    if indices.numel():
        low, high = torch.stack(torch.aminmax(indices)).tolist()  # a GPU is waited for once
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


MAX_GROUPS = 1024
"""Groups of one product, as `split` allows parts: each is a call of its own."""


def grouped_mm(
    x: Tensor, weights: Tensor, offs: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Rows of `x` [rows, in] times the matrix of their group, `weights` [groups, in, out] → [rows, out].

    Group g has the rows before `offs[g]` that no earlier group has; rows after the last one give zeros. One
    product a group, so the bits do not depend on how a device tiles.
    """
    if bias is not None or dtype not in (None, x.dtype):
        raise ValueError("a grouped product takes neither a bias nor another dtype")
    if x.dim() != 2 or weights.dim() != 3 or offs.dim() != 1 or len(offs) != len(weights):
        raise ValueError("a grouped product takes [rows, in], [groups, in, out] and the end of each group")
    if not 1 <= len(weights) <= MAX_GROUPS or offs.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"a grouped product has 1 to {MAX_GROUPS} groups, whose ends are integers")
    matrices = weights.unbind(0)
    if is_abstract(x):
        return x @ matrices[0]
    last = [int(end) for end in offs.tolist()]
    sizes = [end - begin for begin, end in zip([0, *last], [*last, len(x)], strict=False)]
    if min(sizes) < 0:
        raise IndexError(f"the ends of the groups {last[:8]} do not ascend within {len(x)} rows")
    parts = torch.split(x, sizes)
    done = [part @ matrix for part, matrix in zip(parts, matrices, strict=False)]
    return torch.cat([*done, parts[-1] @ torch.zeros_like(matrices[0])] if sizes[-1] else done)


def histogram(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002 (torch's names)
    """`aten.histc`, counted on the CPU: a GPU's kernel adds in no fixed order."""
    if x.requires_grad:
        raise ValueError("a histogram has no gradient")
    if is_abstract(x):
        return torch.ops.aten.histc.default(x, bins, min, max)  # type: ignore[no-any-return]
    return torch.ops.aten.histc.default(x.cpu(), bins, min, max).to(x.device)  # type: ignore[no-any-return]


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`aten.index_put` that writes at most as many places as `x` and `values` have elements.

    Indices are combined as they broadcast, which costs no memory, so a stranger could ask for any number.
    """
    numbers = [one.shape for one in indices if one is not None and one.dtype in (torch.int32, torch.int64)]
    places: Sequence[int] = torch.broadcast_shapes(*numbers)  # type: ignore[no-untyped-call]
    if math.prod(places) > x.numel() + values.numel():
        raise ValueError("more places are written than there are elements")
    return torch.ops.aten.index_put.default(x, indices, values, accumulate)  # type: ignore[no-any-return]


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`aten.masked_scatter`: the places of `x` where `mask` is true get the elements of `source`, in order.

    Raises IndexError if `source` has fewer; torch's kernel on a GPU would read beyond it.
    """
    mask = mask.expand(x.shape)
    place = mask.flatten().cumsum(0) - 1
    if is_abstract(x):
        return torch.ops.aten.masked_scatter.default(x, mask, source)  # type: ignore[no-any-return]
    if place.numel() and int(place[-1]) >= source.numel():
        raise IndexError(f"{int(place[-1]) + 1} places get {source.numel()} elements")
    if not source.numel():
        return x.clone()
    return torch.where(mask, source.flatten()[place.clamp(min=0)].view(x.shape), x)


FAMILY: Mapping[str, Operator] = {
    "aten.masked_scatter.default": Operator(masked_scatter),
    "aten._grouped_mm.default": Operator(grouped_mm, keywords=frozenset({"offs"})),
    "aten.histc.default": Operator(histogram, keywords=frozenset({"bins", "min", "max"})),
    "aten.index_put.default": Operator(index_put),
    **aten(
        """
        index_add.default scatter.src scatter.value scatter_add.default scatter_reduce.two

        """
    ),
}
