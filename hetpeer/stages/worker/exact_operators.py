"""Operators that round once: the numbers of another honest machine, to measure what rounding changes.

In the mode `RoundedOnce` each operator, forward and backward, computes in float64, and its result is rounded
to the dtype that it has without the mode. Its inner additions and functions are then (nearly) exact. Another
processor's kernels differ from that about as far as this one's do.

    with RoundedOnce():
        outputs = block.forward(bundle, data, batch=8, here=Pass(draw))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class RoundedOnce(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which operators compute in float64 and round once.

    Operators that change or view a tensor, and those without a kernel for float64, stay as they are.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        usual = func(*args, **kwargs)
        schema = func._schema  # noqa: SLF001 (has no public name)
        if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
            return usual
        try:
            exact = func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
            return tree_map(_as_usual, usual, exact)
        except (RuntimeError, NotImplementedError, ValueError):  # kernels exist for fewer dtypes on a GPU
            return usual


def _widened(argument: Any) -> Any:
    """`argument`, with float64 for each lower float."""
    if isinstance(argument, torch.Tensor):
        return argument.double() if argument.is_floating_point() else argument
    lower = isinstance(argument, torch.dtype) and argument.is_floating_point
    return torch.float64 if lower else argument


def _as_usual(usual: Any, exact: Any) -> Any:
    """`exact` in the dtype of `usual`; indices stay the usual ones."""
    if isinstance(usual, torch.Tensor) and usual.is_floating_point():
        return exact.to(usual.dtype)
    return usual
