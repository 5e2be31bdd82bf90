"""Conversion of torch's exported graph to our own calls: plain data, with hidden state made explicit.

Sizes that depend on the batch become `Batch(k)`. Dropout, attention with dropout and BatchNorm become the
operators of own_operators.py. Checks that export leaves in the graph are removed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import (
    ITEM_BYTES,
    Argument,
    Batch,
    OperatorCall,
    Ref,
    Size,
    Symbol,
    TensorSpec,
    Value,
)
from hetpeer.stages.graph.interpreter import check_call
from hetpeer.stages.operators.ctc_loss import CTC_LOSS
from hetpeer.stages.operators.drawn_operators import BERNOULLI, KEEP, UNIFORM
from hetpeer.stages.operators.names import ATTENTION, BATCH_NORM, DROPOUT
from hetpeer.stages.operators.scan_operators import LINEAR_SCAN
from hetpeer.stages.tracing.draws import SDPA, SIZED, USUAL
from hetpeer.stages.tracing.refusals import DRAWS, VALUES, line_of, unfit, unsupported

ASSERTIONS = frozenset(
    {
        "aten._assert_scalar.default",
        "aten._assert_tensor_metadata.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
"""Checks that export leaves in the graph; they would pin the author's device on every peer."""

PLACEMENT = frozenset({"device", "pin_memory", "layout"})
"""Arguments about a tensor's place, which the peer that runs the block decides."""

NATIVE_DROPOUT = "aten.native_dropout.default"
NATIVE_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
INSTEAD: Mapping[str, str] = {
    "transformers.grouped_mm_fallback.default": "aten._grouped_mm.default",
    "hetpeer.linear_scan.default": LINEAR_SCAN,
    "hetpeer.ctc_loss.default": CTC_LOSS,
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
"""Operators → others that do the same: zeros stand for memory that nobody wrote."""

CAT, FLOOR, ADD = "aten.cat.default", "aten.floor.default", "aten.add.Tensor"
SLICE = "aten.slice.Tensor"
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
AGAIN = "@"
"""Mark of torch.export in the key of a module's second and later calls."""


@dataclass(slots=True)
class Rewriter:
    """Converts the nodes of one graph, in order; `nodes` and `values` grow as it goes."""

    nodes: list[OperatorCall] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    """Call → the author's line that made it, and a library's before it."""
    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Call → paths of the modules whose forward made it, outermost first."""
    repeated: set[str] = field(default_factory=set)
    """Paths of modules that are called several times."""
    running: dict[str, str] = field(default_factory=dict)
    """Value that is the new content of BatchNorm's running mean or variance → that buffer's value name."""
    _first_result: dict[str, str] = field(default_factory=dict)
    """Name of a `getitem 0` → the call whose only result that is now."""
    numbers: Mapping[fx.Node, int] = field(default_factory=dict)
    """Random draw → its number in the program; `read_numbers` has them."""

    def add(self, node: fx.Node) -> None:
        """Convert the next node of the author's program. Raises LocalError HP-MODEL-001, HP-MODEL-003."""
        op = "getitem" if node.target is operator.getitem else str(node.target)
        if op in ASSERTIONS or isinstance(node.meta.get("val"), SYMBOLIC):
            return
        self.lines[node.name] = author_line(node)
        stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        self.modules[node.name] = tuple(path for path, _ in stack.values() if path)
        self.repeated.update(path for key, (path, _) in stack.items() if AGAIN in key)
        if any(map(_depends_on_values, _sizes(node.meta["val"]))):
            raise unsupported(op, "the size of its result depends on values", self.lines[node.name], VALUES)
        if op == NATIVE_DROPOUT:
            self._add_dropout(node)
        elif op == NATIVE_BATCH_NORM:
            self._add_batch_norm(node)
        elif op == SDPA and len(node.args) > 4 and node.args[4]:
            self._add_attention(node)
        elif op == "getitem" and self._is_part_of_ours(node):
            self._add_part(node)
        elif op in SIZED:
            self._add_draw(node, op)
        elif op == FLOOR and (kept := _kept(node)):
            self._add_keep(node, *kept)
        elif op == CAT:
            self._add_cat(node)
        elif op == SLICE:
            self._add_slice(node)
        else:
            op = INSTEAD.get(op, op)
            self._emit(node.name, op, self._arguments(node), self._keywords(node), node.meta["val"])

    def _emit(
        self, name: str, op: str, args: tuple[Argument, ...], kwargs: Mapping[str, Argument], val: Any
    ) -> None:
        """Append a call to the graph. Raises an error with the line if volunteers cannot run it."""
        node = OperatorCall(name=name, op=op, args=args, kwargs=kwargs)
        try:
            check_call(node)
        except ProtocolError as error:
            raise unsupported(op, error.what, self.lines[name]) from error
        self.nodes.append(node)
        self.values[name] = describe(val)

    def _add_cat(self, node: fx.Node) -> None:
        """Append a `cat` without tensors of shape [0], which torch ignores: empty caches of transformers."""
        parts, *rest = node.args
        assert isinstance(parts, (list, tuple))
        full = [part for part in parts if not isinstance(part, fx.Node) or part.meta["val"].shape != (0,)]
        args = (self._argument(node, full or parts), *(self._argument(node, one) for one in rest))
        self._emit(node.name, CAT, args, self._keywords(node), node.meta["val"])

    def _add_slice(self, node: fx.Node) -> None:
        """Append a slice; a bound that counts samples from the end is counted from the start."""
        x, dim, *bounds = (*self._arguments(node), 0)[: max(len(node.args), 2)]
        assert isinstance(node.args[0], fx.Node)
        assert isinstance(dim, int)
        size = _size(node.args[0].meta["val"].shape[dim])
        args = (x, dim, *(_from_start(bound, size) for bound in bounds))
        self._emit(node.name, SLICE, args, self._keywords(node), node.meta["val"])

    # ── hidden state ───────────────────────────────────────────────────────────────────────────────────────

    def _add_dropout(self, node: fx.Node) -> None:
        x, probability, *_ = self._arguments(node)
        number = self.numbers.get(node, 0)
        self._emit(node.name, DROPOUT, (x, probability, number), {}, node.meta["val"][0])

    def _add_attention(self, node: fx.Node) -> None:
        query, key, value, mask, probability, *causal = self._arguments(node)
        number = self.numbers[node]
        args = (query, key, value, mask, probability, bool(causal and causal[0]), number)
        self._emit(node.name, ATTENTION, args, self._keywords(node), node.meta["val"])

    def _add_draw(self, node: fx.Node, op: str) -> None:
        """Append our own draw of the size that torch's has."""
        own, bounds = SIZED[op], self._arguments(node)[1:]
        if op in USUAL and bounds != USUAL[op][: len(bounds)]:
            raise unsupported(op, f"it draws by {bounds}", self.lines[node.name], DRAWS)
        result = node.meta["val"]
        if result.dtype != torch.float32:
            raise unsupported(op, f"it draws {result.dtype}", self.lines[node.name], DRAWS)
        parameters = (bounds or (0.5,)) if own == BERNOULLI else ()
        args = (tuple(map(_size, result.shape)), *parameters, self.numbers[node])
        self._emit(node.name, own, args, {}, result)

    def _add_keep(self, node: fx.Node, draw: fx.Node, probability: float) -> None:
        """Append `floor(rand + probability)`, the usual drop path, as one call that knows of evaluations."""
        sizes = tuple(map(_size, node.meta["val"].shape))
        self._emit(node.name, KEEP, (sizes, probability, self.numbers[draw]), {}, node.meta["val"])

    def _add_batch_norm(self, node: fx.Node) -> None:
        """Append our own BatchNorm. Raises an error if its statistics are not plain running values."""
        x, weight, bias, mean, variance, training, momentum, epsilon = self._arguments(node)
        if training is not True or not isinstance(momentum, float):
            raise unsupported(
                NATIVE_BATCH_NORM, "its statistics are not plain running values", self.lines[node.name]
            )
        if any(isinstance(value, fx.Node) and value.op != "placeholder" for value in node.args[3:5]):
            raise unsupported(NATIVE_BATCH_NORM, "it runs twice in one forward", self.lines[node.name])
        args = (x, weight, bias, mean, variance, momentum, epsilon)
        self._emit(node.name, BATCH_NORM, args, {}, node.meta["val"][0])

    def _is_part_of_ours(self, node: fx.Node) -> bool:
        source = node.args[0]
        return isinstance(source, fx.Node) and str(source.target) in (NATIVE_DROPOUT, NATIVE_BATCH_NORM)

    def _add_part(self, node: fx.Node) -> None:
        """Note an item of a tuple: the first, or running values of BatchNorm; others must be unused."""
        source, position = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(position, int)
        if position == 0:
            self._first_result[node.name] = source.name
            return
        if str(source.target) == NATIVE_BATCH_NORM and position in (3, 4):
            buffer = source.args[position]
            assert isinstance(buffer, fx.Node)
            self.running[node.name] = buffer.name
        elif node.users:
            raise unsupported(
                str(source.target), "more than its first result is used", self.lines[source.name]
            )

    # ── arguments ──────────────────────────────────────────────────────────────────────────────────────────

    def _arguments(self, node: fx.Node) -> tuple[Argument, ...]:
        return tuple(self._argument(node, argument) for argument in node.args)

    def _keywords(self, node: fx.Node) -> dict[str, Argument]:
        named = {
            key: self._argument(node, value) for key, value in node.kwargs.items() if key not in PLACEMENT
        }
        return {key: argument for key, argument in named.items() if argument is not None}

    def _argument(self, node: fx.Node, argument: Any) -> Argument:
        """An argument as plain data. Raises an error for types that the graph cannot hold."""
        if argument is None or type(argument) in (bool, int, float):
            return argument  # type: ignore[no-any-return]
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            if isinstance(value, SYMBOLIC):
                if not isinstance(value, torch.SymInt) or _depends_on_values(value):
                    raise unsupported(
                        str(argument.target), "its result is no size", author_line(argument), VALUES
                    )
                return _size(value)
            return Ref(self.name(argument.name))
        if isinstance(argument, (list, tuple)):
            return tuple(self._argument(node, item) for item in argument)
        if isinstance(argument, torch.device):
            return Symbol("device", "")
        if isinstance(argument, str):
            return Symbol("text", argument)
        for kind, family in (("dtype", torch.dtype), ("memory_format", torch.memory_format)):
            if isinstance(argument, family):
                return Symbol(kind, str(argument).removeprefix("torch."))
        raise unsupported(str(node.target), f"it has a {type(argument).__name__}", self.lines[node.name])

    def called_once(self, name: str) -> tuple[str, ...]:
        """Paths of the modules, outermost first, in whose only call the call `name` was made."""
        return tuple(path for path in self.modules.get(name, ()) if path not in self.repeated)

    def name(self, exported: str) -> str:
        """Our name of a value of the exported graph."""
        return self._first_result.get(exported, exported)


def describe(val: Any) -> Value:
    """Spec of a traced value, no gradient flag. Raises LocalError HP-MODEL-003 for a wrong size or dtype."""
    if isinstance(val, (tuple, list)):
        return tuple(describe_tensor(part) for part in val)
    return describe_tensor(val)


def describe_tensor(tensor: torch.Tensor, *, grad: bool = False) -> TensorSpec:
    """The same for one tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise unfit(
            f"the model or its input holds a tensor of {dtype}",
            "peers do not send such tensors",
            f"use one of {', '.join(ITEM_BYTES)}",
        )
    return TensorSpec(shape=tuple(map(_size, tensor.shape)), dtype=dtype, grad=grad)


def _sizes(val: Any) -> list[Any]:
    """All sizes of a traced value."""
    return [size for tensor in (val if isinstance(val, (tuple, list)) else [val]) for size in tensor.shape]


def _depends_on_values(size: Any) -> bool:
    return isinstance(size, SYMBOLIC) and bool(free_unbacked_symbols(size))


def _size(size: Any) -> Size:
    """A number, or a multiple of the batch, which is the graph's only symbol."""
    if isinstance(size, int):
        return int(size)
    if isinstance(size, torch.SymInt):
        factor, symbol = size.node.expr.as_coeff_Mul()
        if symbol == 1:
            return int(factor)
        if symbol.is_Symbol and factor.is_Integer:
            return Batch(int(factor))
    raise unfit(
        f"a size in the model is {size}, which is no multiple of the batch",
        "the last microbatch of a step may have fewer samples",
        "let sizes depend on the number of samples by multiplication only",
    )


def _from_start(bound: Argument, size: Size) -> Argument:
    """A slice's bound; a negative number of samples is counted from the start of a dimension of `size`."""
    if isinstance(bound, Batch) and isinstance(size, Batch) and bound.multiple < 0:
        left = size.multiple + bound.multiple
        return Batch(left) if left > 0 else 0
    return bound


def _kept(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The draw and the number of `floor(rand + number)`; None if that is not what `node` is."""
    match node.args[0]:
        case fx.Node(args=(fx.Node() as draw, float() as number)) as added if str(added.target) == ADD:
            return (draw, number) if SIZED.get(str(draw.target)) == UNIFORM and 0 <= number <= 1 else None
    return None


def author_line(node: fx.Node) -> str:
    """The author's line, from the stack that torch keeps with each node."""
    return line_of(re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or ""))
