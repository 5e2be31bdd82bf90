"""Complex numbers of a traced program as pairs of real ones: a tensor [..., 2] stands for a complex [...].

Meta's reference Llama turns queries and keys by a table of complex numbers. Complex tensors are not on the
list of what peers send, so the program is rewritten on the author's machine, before it becomes calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map_only

from hetpeer.stages.tracing.refusals import unfit, unsupported
from hetpeer.stages.tracing.rewrite import ASSERTIONS, author_line

aten: Any = torch.ops.aten
TIMES = aten.mul.Tensor
PAIRS = ":pairs"
"""Suffix of the name of a buffer of pairs; the author's complex buffer keeps its own name."""
NO_PAIRS = "it computes complex numbers, and is not one of those that are rewritten to real ones"


def without_complex(exported: ExportedProgram) -> None:
    """Replace the complex values of a decomposed program by pairs, in place.

    A placeholder keeps its name: the caller passes pairs. Raises LocalError HP-MODEL-001 for an operator
    that has no such form, HP-MODEL-003 for a complex parameter or loss.
    """
    graph = exported.graph_module.graph
    pairs: dict[fx.Node, fx.Node] = {}
    """Complex node → the node with its pairs."""
    names = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs}
    dropped = []
    for node in list(graph.nodes):
        reads = any(source in pairs for source in node.all_input_nodes)
        if node.op == "placeholder" and _is_complex(node):
            _take_pairs(node, names[node.name])
            pairs[node] = node
        elif node.op == "output" and reads:
            raise unfit("forward() returns complex numbers", "a loss is real", "return a float32 scalar")
        elif node.op == "call_function" and (reads or _is_complex(node)):
            dropped.append(node)
            if str(node.target) not in ASSERTIONS:
                new = _Rewriting(graph, node, pairs).replacement()
                if _is_complex(node):
                    pairs[node] = new
                else:
                    _stand_in(exported, node, new)
    for node in reversed(dropped):
        graph.erase_node(node)


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _take_pairs(node: fx.Node, name: str | None) -> None:
    """Let a placeholder stand for pairs. Raises LocalError HP-MODEL-003 if it is a parameter."""
    value = node.meta["val"]
    if value.requires_grad:
        raise unfit(
            f"parameter {name!r} is {value.dtype}",
            "holders agree on the bits of float32 parameters",
            "keep its real and imaginary parts in one float32 parameter, and use torch.view_as_complex",
        )
    node.meta["val"] = torch.view_as_real(value)


def _stand_in(exported: ExportedProgram, node: fx.Node, new: fx.Node) -> None:
    """Let `new` be read in place of `node`, also as the program's result."""
    node.replace_all_uses_with(new)
    for output in exported.graph_signature.output_specs:
        if output.arg.name == node.name:
            output.arg.name = new.name


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """One call that makes or reads complex values."""

    graph: fx.Graph
    node: fx.Node
    pairs: Mapping[fx.Node, fx.Node]

    def replacement(self) -> fx.Node:
        """The node with the same result, in pairs if it is complex; new nodes are before the call."""
        target = str(self.node.target)
        write = WRITERS.get(target)
        if write is None:
            raise self.refusal()
        args = tree_map_only(fx.Node, lambda one: self.pairs.get(one, one), list(self.node.args))
        return write(self, *args)

    def refusal(self) -> Exception:
        """HP-MODEL-001 for this call."""
        return unsupported(str(self.node.target), NO_PAIRS, author_line(self.node))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call on real values, with its spec."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        values = tree_map_only(fx.Node, lambda one: one.meta["val"], (args, kwargs))
        new.meta = {**self.node.meta, "val": target(*values[0], **values[1])}
        return new

    def is_pairs(self, position: int) -> bool:
        """Whether an argument of the call is complex."""
        argument = self.node.args[position]
        return isinstance(argument, fx.Node) and argument in self.pairs

    def parts(self, pair: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Real and imaginary part."""
        return self.call(aten.select.int, pair, -1, 0), self.call(aten.select.int, pair, -1, 1)

    def pair(self, real: fx.Node, imaginary: fx.Node) -> fx.Node:
        """Pairs of two parts of one shape."""
        return self.call(aten.stack.default, [real, imaginary], -1)


def _same(_: _Rewriting, x: fx.Node, *_rest: Any) -> fx.Node:
    """An operator between pairs and complex numbers, or one that copies."""
    return x


def _polar(at: _Rewriting, length: fx.Node, angle: fx.Node) -> fx.Node:
    real, imaginary = at.call(aten.cos.default, angle), at.call(aten.sin.default, angle)
    return at.pair(at.call(TIMES, length, real), at.call(TIMES, length, imaginary))


def _complex(at: _Rewriting, real: fx.Node, imaginary: fx.Node) -> fx.Node:
    if real.meta["val"].shape != imaginary.meta["val"].shape:
        raise at.refusal()
    return at.pair(real, imaginary)


def _multiply(at: _Rewriting, a: Any, b: Any) -> fx.Node:
    """Product of two complex tensors, or of one and a real tensor or number."""
    if at.is_pairs(0) and at.is_pairs(1):
        (a_real, a_imaginary), (b_real, b_imaginary) = at.parts(a), at.parts(b)
        straight = [at.call(TIMES, a_real, b_real), at.call(TIMES, a_imaginary, b_imaginary)]
        crossed = [at.call(TIMES, a_real, b_imaginary), at.call(TIMES, a_imaginary, b_real)]
        return at.pair(at.call(aten.sub.Tensor, *straight), at.call(aten.add.Tensor, *crossed))
    return _scale(at, a, b) if at.is_pairs(0) else _scale(at, b, a)


def _scale(at: _Rewriting, x: fx.Node, factor: Any) -> fx.Node:
    """The call's own operator on pairs and a real tensor or number: a product or a quotient."""
    if isinstance(factor, fx.Node) and isinstance(factor.meta["val"], torch.Tensor):
        factor = at.call(aten.unsqueeze.default, factor, -1)
    elif isinstance(factor, complex):
        raise at.refusal()
    return at.call(at.node.target, x, factor)


def _divide(at: _Rewriting, x: fx.Node, divisor: Any) -> fx.Node:
    if not at.is_pairs(0) or at.is_pairs(1):
        raise at.refusal()
    return _scale(at, x, divisor)


def _add(at: _Rewriting, a: Any, b: Any) -> fx.Node:
    """Sum or difference of two complex tensors."""
    if not (at.is_pairs(0) and at.is_pairs(1)):
        raise at.refusal()
    return at.call(at.node.target, a, b, **at.node.kwargs)


def _conjugate(at: _Rewriting, x: fx.Node) -> fx.Node:
    real, imaginary = at.parts(x)
    return at.pair(real, at.call(aten.neg.default, imaginary))


def _cast(at: _Rewriting, x: fx.Node) -> fx.Node:
    """A copy between the two complex dtypes."""
    source = at.node.args[0]
    assert isinstance(source, fx.Node)
    if not _is_complex(at.node) or source not in at.pairs:
        raise at.refusal()
    return at.call(aten._to_copy.default, x, dtype=at.node.meta["val"].dtype.to_real())  # noqa: SLF001 (its name)


def _each(at: _Rewriting, *args: Any) -> fx.Node:
    """An operator that does the same to real and imaginary parts."""
    return at.call(at.node.target, *args, **at.node.kwargs)


def _by_dimension(at: _Rewriting, x: Any, *rest: Any) -> fx.Node:
    """The same of one that takes dimensions as its second argument: the last one is now that of the pairs."""
    if not rest:
        return _each(at, x)
    dims, *others = rest
    moved = [_before_pairs(one) for one in dims] if isinstance(dims, (list, tuple)) else _before_pairs(dims)
    return _each(at, x, moved, *others)


def _before_pairs(dim: int) -> int:
    return dim - 1 if dim < 0 else dim


def _swap(at: _Rewriting, x: fx.Node, first: int, second: int) -> fx.Node:
    return _each(at, x, _before_pairs(first), _before_pairs(second))


def _permute(at: _Rewriting, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    return _each(at, x, [*map(_before_pairs, dims), -1])


def _resize(at: _Rewriting, x: fx.Node, sizes: Sequence[Any]) -> fx.Node:
    """A view or an expansion to sizes of complex numbers."""
    return _each(at, x, [*sizes, 2])


def _part(position: int) -> Callable[[_Rewriting, fx.Node], fx.Node]:
    return lambda at, x: at.call(aten.select.int, x, -1, position)


def _length(at: _Rewriting, x: fx.Node) -> fx.Node:
    return at.call(aten.linalg_vector_norm.default, x, 2, [-1])


def _named(names: str, write: Callable[..., fx.Node]) -> dict[str, Callable[..., fx.Node]]:
    return {f"aten.{name}": write for name in names.split()}


WRITERS: Mapping[str, Callable[..., fx.Node]] = {
    **_named("view_as_complex.default view_as_real.default resolve_conj.default", _same),
    **_named("alias.default clone.default contiguous.default detach.default", _same),
    **_named("polar.default", _polar),
    **_named("complex.default", _complex),
    **_named("mul.Tensor", _multiply),
    **_named("div.Tensor", _divide),
    **_named("add.Tensor sub.Tensor", _add),
    **_named("neg.default index.Tensor", _each),
    **_named("_conj.default conj_physical.default", _conjugate),
    **_named("_to_copy.default", _cast),
    **_named("cat.default stack.default slice.Tensor select.int unsqueeze.default", _by_dimension),
    **_named("squeeze.dim squeeze.dims index_select.default sum.dim_IntList mean.dim", _by_dimension),
    **_named("transpose.int", _swap),
    **_named("permute.default", _permute),
    **_named("view.default _unsafe_view.default reshape.default expand.default", _resize),
    **_named("real.default", _part(0)),
    **_named("imag.default", _part(1)),
    **_named("abs.default", _length),
}
"""Operator on complex values → the same in pairs, from the call and its arguments."""
