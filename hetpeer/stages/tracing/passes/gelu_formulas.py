"""GELU in its form with tanh, written out by the author, replaced by torch's own operator.

½ x (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks and Gimpel, Gaussian error linear units, arXiv:1606.08415)
is eight calls in the models of transformers that have `gelu_new`, GPT-2 among them. Each reads and writes a
tensor four times as wide as the model, and autograd keeps five of them. One operator keeps its input alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetpeer.stages.graph.block_spec import Argument, OperatorCall, Ref, Symbol, TensorSpec, Value

GELU = "aten.gelu.default"
MUL, ADD, POW, TANH = "aten.mul.Tensor", "aten.add.Tensor", "aten.pow.Tensor_Scalar", "aten.tanh.default"
CUBIC, SLOPE = 0.044715, math.sqrt(2 / math.pi)
PAIR = 2
NEAR = 1e-6
"""Relative difference up to which a constant of the author's is that of the formula."""


def with_gelu(nodes: Sequence[OperatorCall], values: Mapping[str, Value]) -> list[OperatorCall]:
    """`nodes` with one call for each GELU; those that nothing reads any more are left in.

    Numbers stay the same up to rounding.
    """
    reader = _Reader(
        {node.name: node for node in nodes}, Counter(name for node in nodes for name in node.references())
    )
    result = []
    for node in nodes:
        x = reader.gelu_of(node)
        alike = x is not None and _spec(values, x.name) == _spec(values, node.name) is not None
        tanh = {"approximate": Symbol("text", "tanh")}
        result.append(replace(node, op=GELU, args=(x,), kwargs=tanh) if x is not None and alike else node)
    return result


def _spec(values: Mapping[str, Value], name: str) -> tuple[object, ...] | None:
    """Shape and dtype of a single tensor; None if it is none, or not known."""
    value = values.get(name)
    return (value.shape, value.dtype) if isinstance(value, TensorSpec) else None


@dataclass(frozen=True, slots=True)
class _Reader:
    """The calls by name, and how often each value is read."""

    calls: Mapping[str, OperatorCall]
    reads: Mapping[str, int]

    def gelu_of(self, node: OperatorCall) -> Ref | None:
        """The x of which `node` is the GELU; None if it is something else, or others read what is between."""
        for half, rest in self._orders(node, MUL):
            x = self._scaled(half, 0.5)
            tanh = self._plus_one(rest)
            if x is not None and tanh is not None and self._is_inner(tanh, x):
                return x
        return None

    def _is_inner(self, tanh: OperatorCall, x: Ref) -> bool:
        """Whether `tanh` is that of √(2/π) (x + 0.044715 x³)."""
        total = self._only(self._scaled(tanh.args[0], SLOPE))
        for one, other in self._orders(total, ADD):
            cube = self._only(self._scaled(other, CUBIC))
            if one == x and cube is not None and cube.op == POW and cube.args == (x, 3.0):
                return True
        return False

    def _plus_one(self, argument: Argument) -> OperatorCall | None:
        """The call of tanh to which `argument` adds one."""
        for one, other in self._orders(self._only(argument), ADD):
            call = self._only(one)
            if other == 1.0 and call is not None and call.op == TANH:
                return call
        return None

    def _scaled(self, argument: Argument, factor: float) -> Ref | None:
        """The value that `argument` multiplies by `factor`."""
        for one, other in self._orders(self._only(argument), MUL):
            if (
                isinstance(one, Ref)
                and isinstance(other, float)
                and math.isclose(other, factor, rel_tol=NEAR)
            ):
                return one
        return None

    def _only(self, argument: Argument) -> OperatorCall | None:
        """The call that makes `argument`, if nobody else reads it."""
        if not isinstance(argument, Ref) or self.reads[argument.name] != 1:
            return None
        return self.calls.get(argument.name)

    @staticmethod
    def _orders(call: OperatorCall | None, op: str) -> list[tuple[Argument, Argument]]:
        """Both orders of the two arguments of `call`, if it is one of `op` and has no others."""
        if call is None or call.op != op or call.kwargs or len(call.args) > PAIR:
            return []
        one, other = call.args
        return [(one, other), (other, one)]
