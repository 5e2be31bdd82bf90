"""Operators of torch of which some calls are refused: those with unbounded cost or hidden state.

A refusal is a TypeError or ValueError; the interpreter adds the name of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetpeer.stages.operators.operator_family import Operator

RECURRENT_ARGUMENTS = 9
MAX_PARTS = 1024
"""Tensors that one call may return: a view costs no memory of its own, a million of them does."""

aten: Any = torch.ops.aten


def getitem(parts: Any, position: Any) -> Any:
    """Pick one result of an operator with several."""
    if not isinstance(parts, (tuple, list)) or type(position) is not int:
        raise TypeError("getitem takes the results of an operator and a position")
    return parts[position]


def split(x: Any, size: Any, dim: Any = 0) -> Any:
    """`aten.split.Tensor` into at most MAX_PARTS tensors."""
    _check_parts(-(-x.shape[dim] // size))
    return aten.split.Tensor(x, size, dim)


def chunk(x: Any, chunks: Any, dim: Any = 0) -> Any:
    """`aten.chunk` into at most MAX_PARTS tensors."""
    _check_parts(min(x.shape[dim], chunks))
    return aten.chunk.default(x, chunks, dim)


def unbind(x: Any, dim: Any = 0) -> Any:
    """`aten.unbind` into at most MAX_PARTS tensors."""
    _check_parts(x.shape[dim])
    return aten.unbind.int(x, dim)


def _check_parts(parts: int) -> None:
    if not 0 <= parts <= MAX_PARTS:
        raise ValueError(f"a tensor may be split into at most {MAX_PARTS} parts, not {parts}")


def _recurrent(operator: Any) -> Callable[..., Any]:
    """LSTM or GRU without dropout [input, state, weights, bias, layers, 0, train, both ways, batch first]."""

    def run(*args: Any) -> Any:
        if len(args) != RECURRENT_ARGUMENTS or args[5] != 0:
            raise ValueError(
                "a recurrent layer draws its own dropout: set it to 0 and use nn.Dropout between layers"
            )
        return operator(*args)

    return run


def _lstm(*args: Any) -> Any:
    """An LSTM, without oneDNN where that would fail.

    Under autocast oneDNN gets an LSTM in bfloat16 even on processors with only AVX2, and fails (seen with
    torch 2.13).
    """
    capable = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if args[0].device.type != "cpu" or not torch.is_autocast_enabled("cpu") or capable:
        return aten.lstm.input(*args)
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = False  # for the whole process; other operators are slower meanwhile, but correct
    try:
        return aten.lstm.input(*args)
    finally:
        onednn.enabled = before


lstm, gru = _recurrent(_lstm), _recurrent(aten.gru.input)


def instance_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Any:
    """InstanceNorm without running values."""
    if mean is not None or variance is not None:
        raise ValueError("InstanceNorm keeps running values: set track_running_stats=False")
    return aten.instance_norm.default(x, weight, bias, mean, variance, *rest)


def own_statistics(x: Any, weight: Any, bias: Any, training: Any, *rest: Any) -> Any:
    """BatchNorm by the statistics of `x` alone, for standardised weights: (result, mean, 1/deviation)."""
    if training is not True:
        raise ValueError("a BatchNorm without running values takes its input's statistics")
    return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, *rest)  # noqa: SLF001 (torch's name)


def copy(x: Any, source: Any, non_blocking: Any = False) -> Any:  # noqa: ARG001 (torch's signature)
    """`aten.copy`, which has no derivative in torch: `source` in the shape and dtype of `x`."""
    return source.to(x.dtype).expand(x.shape)


def unfold(x: Any, dim: Any, size: Any, step: Any) -> Any:
    """`aten.unfold` into at most MAX_PARTS windows of a tensor: they are views, which may overlap."""
    _check_parts((x.shape[dim] - size) // step + 1)
    return aten.unfold.default(x, dim, size, step)


def linalg_norm(x: Any, order: Any = None, dim: Any = None, keepdim: Any = False, **kwargs: Any) -> Any:
    """`aten.linalg_norm` of vectors: a matrix's norm may take a decomposition, which costs n³."""
    if order is not None and (dim is None or len(dim) != 1):
        raise ValueError("a norm of an order is that of vectors: name one dimension")
    return aten.linalg_norm.default(x, order, dim, keepdim, **kwargs)


def one_hot(x: Any, classes: Any = -1) -> Any:
    """`aten.one_hot` with a given number of classes."""
    if type(classes) is not int or classes < 1:
        raise ValueError("the number of classes must be given")
    return aten.one_hot.default(x, classes)


FAMILY: Mapping[str, Operator] = {
    "getitem": Operator(getitem, moves=True),
    "aten.copy.default": Operator(copy),
    "aten._native_batch_norm_legit.no_stats": Operator(own_statistics),
    "aten.chunk.default": Operator(chunk, moves=True),
    "aten.split.Tensor": Operator(split, moves=True),
    "aten.unfold.default": Operator(unfold, moves=True),
    "aten.unbind.int": Operator(unbind, moves=True),
    "aten.gru.input": Operator(gru),
    "aten.linalg_norm.default": Operator(linalg_norm),
    "aten.lstm.input": Operator(lstm),
    "aten.instance_norm.default": Operator(instance_norm),
    "aten.one_hot.default": Operator(one_hot),
}
