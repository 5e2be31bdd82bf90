"""The operators a block may use: a literal table, so a name from the wire is a dictionary key and nothing more.

Only pure operators are here: same inputs, same outputs, on any peer and as often as a task is redone. That leaves out
random operators, in-place ones, those that read memory they did not write (`empty`, `as_strided`) and those that touch
files. A wider table needs the same questions asked of each new row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.graph.spec import ITEM_BYTES, Argument, Node, Symbol

MAX_PARTS = 1024
"""Tensors one call may return: a view costs no memory of its own, a million of them do."""

aten: Any = torch.ops.aten


def _getitem(parts: Any, position: Any) -> Any:
    """Pick one result of an operator with several."""
    if not isinstance(parts, (tuple, list)) or type(position) is not int:
        raise TypeError("getitem takes the results of an operator and a position")
    return parts[position]


def _split(x: Any, size: Any, dim: Any = 0) -> Any:
    _check_parts(-(-x.shape[dim] // size))
    return aten.split.Tensor(x, size, dim)


def _chunk(x: Any, chunks: Any, dim: Any = 0) -> Any:
    _check_parts(min(x.shape[dim], chunks))
    return aten.chunk.default(x, chunks, dim)


def _unbind(x: Any, dim: Any = 0) -> Any:
    _check_parts(x.shape[dim])
    return aten.unbind.int(x, dim)


def _check_parts(parts: int) -> None:
    if not 0 <= parts <= MAX_PARTS:
        raise ValueError(f"a tensor may be split into at most {MAX_PARTS} parts, not {parts}")


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "getitem": _getitem,
    # Arithmetic
    "aten.abs.default": aten.abs.default,
    "aten.add.Scalar": aten.add.Scalar,
    "aten.add.Tensor": aten.add.Tensor,
    "aten.clamp.default": aten.clamp.default,
    "aten.cos.default": aten.cos.default,
    "aten.div.Scalar": aten.div.Scalar,
    "aten.div.Tensor": aten.div.Tensor,
    "aten.div.Tensor_mode": aten.div.Tensor_mode,
    "aten.erf.default": aten.erf.default,
    "aten.exp.default": aten.exp.default,
    "aten.log.default": aten.log.default,
    "aten.maximum.default": aten.maximum.default,
    "aten.minimum.default": aten.minimum.default,
    "aten.mul.Scalar": aten.mul.Scalar,
    "aten.mul.Tensor": aten.mul.Tensor,
    "aten.neg.default": aten.neg.default,
    "aten.pow.Scalar": aten.pow.Scalar,
    "aten.pow.Tensor_Scalar": aten.pow.Tensor_Scalar,
    "aten.pow.Tensor_Tensor": aten.pow.Tensor_Tensor,
    "aten.reciprocal.default": aten.reciprocal.default,
    "aten.rsqrt.default": aten.rsqrt.default,
    "aten.rsub.Scalar": aten.rsub.Scalar,
    "aten.sin.default": aten.sin.default,
    "aten.sqrt.default": aten.sqrt.default,
    "aten.sub.Scalar": aten.sub.Scalar,
    "aten.sub.Tensor": aten.sub.Tensor,
    # Activations
    "aten._softmax.default": aten._softmax.default,  # noqa: SLF001 (a public operator with a private name)
    "aten.elu.default": aten.elu.default,
    "aten.gelu.default": aten.gelu.default,
    "aten.hardswish.default": aten.hardswish.default,
    "aten.leaky_relu.default": aten.leaky_relu.default,
    "aten.log_softmax.int": aten.log_softmax.int,
    "aten.mish.default": aten.mish.default,
    "aten.relu.default": aten.relu.default,
    "aten.sigmoid.default": aten.sigmoid.default,
    "aten.silu.default": aten.silu.default,
    "aten.softmax.int": aten.softmax.int,
    "aten.softplus.default": aten.softplus.default,
    "aten.tanh.default": aten.tanh.default,
    # Products, convolutions, attention, tables
    "aten.addmm.default": aten.addmm.default,
    "aten.baddbmm.default": aten.baddbmm.default,
    "aten.bmm.default": aten.bmm.default,
    "aten.conv1d.default": aten.conv1d.default,
    "aten.conv2d.default": aten.conv2d.default,
    "aten.embedding.default": aten.embedding.default,
    "aten.linear.default": aten.linear.default,
    "aten.matmul.default": aten.matmul.default,
    "aten.mm.default": aten.mm.default,
    "aten.scaled_dot_product_attention.default": aten.scaled_dot_product_attention.default,
    # Normalisation, pooling, losses
    "aten.adaptive_avg_pool2d.default": aten.adaptive_avg_pool2d.default,
    "aten.avg_pool2d.default": aten.avg_pool2d.default,
    "aten.cross_entropy_loss.default": aten.cross_entropy_loss.default,
    "aten.group_norm.default": aten.group_norm.default,
    "aten.layer_norm.default": aten.layer_norm.default,
    "aten.max_pool2d.default": aten.max_pool2d.default,
    "aten.mse_loss.default": aten.mse_loss.default,
    "aten.native_layer_norm.default": aten.native_layer_norm.default,
    "aten.nll_loss_nd.default": aten.nll_loss_nd.default,
    "aten.rms_norm.default": aten.rms_norm.default,
    # Sums
    "aten.cumsum.default": aten.cumsum.default,
    "aten.mean.default": aten.mean.default,
    "aten.mean.dim": aten.mean.dim,
    "aten.sum.default": aten.sum.default,
    "aten.sum.dim_IntList": aten.sum.dim_IntList,
    # Shapes. A trace fixes strides that another device's kernels do not give: reshape is view where a view can be had.
    "aten.alias.default": aten.alias.default,
    "aten.chunk.default": _chunk,
    "aten.detach.default": aten.detach.default,
    "aten.expand.default": aten.expand.default,
    "aten.flatten.using_ints": aten.flatten.using_ints,
    "aten.permute.default": aten.permute.default,
    "aten.reshape.default": aten.reshape.default,
    "aten.select.int": aten.select.int,
    "aten.slice.Tensor": aten.slice.Tensor,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": aten.split_with_sizes.default,
    "aten.squeeze.dim": aten.squeeze.dim,
    "aten.t.default": aten.t.default,
    "aten.transpose.int": aten.transpose.int,
    "aten.unbind.int": _unbind,
    "aten.unsqueeze.default": aten.unsqueeze.default,
    "aten.view.default": aten.reshape.default,
    "aten._unsafe_view.default": aten.reshape.default,
    # Copies, indexing, making tensors
    "aten._to_copy.default": aten._to_copy.default,  # noqa: SLF001 (as above)
    "aten.arange.default": aten.arange.default,
    "aten.arange.start": aten.arange.start,
    "aten.arange.start_step": aten.arange.start_step,
    "aten.cat.default": aten.cat.default,
    "aten.clone.default": aten.clone.default,
    "aten.constant_pad_nd.default": aten.constant_pad_nd.default,
    "aten.full.default": aten.full.default,
    "aten.full_like.default": aten.full_like.default,
    "aten.gather.default": aten.gather.default,
    "aten.index.Tensor": aten.index.Tensor,
    "aten.ones.default": aten.ones.default,
    "aten.ones_like.default": aten.ones_like.default,
    "aten.scalar_tensor.default": aten.scalar_tensor.default,
    "aten.stack.default": aten.stack.default,
    "aten.tril.default": aten.tril.default,
    "aten.triu.default": aten.triu.default,
    "aten.zeros.default": aten.zeros.default,
    "aten.zeros_like.default": aten.zeros_like.default,
    # Comparing and choosing
    "aten.bitwise_and.Tensor": aten.bitwise_and.Tensor,
    "aten.eq.Scalar": aten.eq.Scalar,
    "aten.eq.Tensor": aten.eq.Tensor,
    "aten.ge.Scalar": aten.ge.Scalar,
    "aten.ge.Tensor": aten.ge.Tensor,
    "aten.gt.Scalar": aten.gt.Scalar,
    "aten.gt.Tensor": aten.gt.Tensor,
    "aten.le.Scalar": aten.le.Scalar,
    "aten.le.Tensor": aten.le.Tensor,
    "aten.logical_and.default": aten.logical_and.default,
    "aten.logical_not.default": aten.logical_not.default,
    "aten.logical_or.default": aten.logical_or.default,
    "aten.lt.Scalar": aten.lt.Scalar,
    "aten.lt.Tensor": aten.lt.Tensor,
    "aten.masked_fill.Scalar": aten.masked_fill.Scalar,
    "aten.ne.Scalar": aten.ne.Scalar,
    "aten.ne.Tensor": aten.ne.Tensor,
    "aten.where.self": aten.where.self,
}

MOVES = frozenset(
    {
        "getitem",
        "aten._unsafe_view.default",
        "aten.alias.default",
        "aten.cat.default",
        "aten.chunk.default",
        "aten.clone.default",
        "aten.detach.default",
        "aten.expand.default",
        "aten.flatten.using_ints",
        "aten.permute.default",
        "aten.reshape.default",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        "aten.squeeze.dim",
        "aten.stack.default",
        "aten.t.default",
        "aten.transpose.int",
        "aten.unbind.int",
        "aten.unsqueeze.default",
        "aten.view.default",
    }
)
"""Operators that compute nothing: they only rearrange."""

FACTORIES = frozenset(
    {
        "aten.arange.default",
        "aten.arange.start",
        "aten.arange.start_step",
        "aten.full.default",
        "aten.ones.default",
        "aten.scalar_tensor.default",
        "aten.zeros.default",
    }
)
"""Operators that make a tensor from no tensor. The runner tells them its device; in a dry run that keeps them from
allocating. All others compute where their arguments are."""

KEYWORDS = frozenset(
    {"alpha", "approximate", "beta", "dtype", "enable_gqa", "memory_format", "rounding_mode", "scale"}
)
"""Arguments that may be given by name."""

SYMBOLS: Mapping[str, Mapping[str, Any]] = {
    "dtype": {name: getattr(torch, name) for name in ITEM_BYTES},
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "preserve_format": torch.preserve_format,
        "channels_last": torch.channels_last,
    },
    "text": {text: text for text in ("none", "tanh", "floor", "trunc")},
}
"""Kind -> value -> what torch takes for it."""


def check_call(node: Node) -> None:
    """Is this a call the table allows? Shapes and types of the arguments are left to the dry run.

    Raises ProtocolError: the operator is unknown (it is named), or an argument is not one that graphs may carry.
    """
    if node.op not in OPERATORS:
        raise ProtocolError(f"operator {node.op!r} is not allowed in a block")
    for keyword in node.kwargs:
        if keyword not in KEYWORDS:
            raise ProtocolError(f"operator {node.op} has the unknown argument {keyword!r}")
    for argument in (*node.args, *node.kwargs.values()):
        _check_symbols(node, argument)


def _check_symbols(node: Node, argument: Argument) -> None:
    if isinstance(argument, Symbol) and argument.value not in SYMBOLS.get(argument.kind, {}):
        raise ProtocolError(f"operator {node.op} has the unknown {argument.kind} {argument.value!r}")
    if isinstance(argument, tuple):
        for item in argument:
            _check_symbols(node, item)
