"""Losses over large vocabularies, rewritten so that logits never exist at once (graph/chunked_loss.py).

The pattern is that of language models: a linear layer without bias, then slices, views and casts, then the
mean cross entropy. Slices and views move in front of the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

from hetpeer.stages.graph.block_spec import ITEM_BYTES, OperatorCall, Ref, Symbol, TensorSpec, Value
from hetpeer.stages.operators.chunked_loss import LINEAR_LOSS

LINEAR, LOSS, SLICE = "aten.linear.default", "aten.cross_entropy_loss.default", "aten.slice.Tensor"
CAST = "aten._to_copy.default"
VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.flatten.using_ints")
COPIES = ("aten.alias.default", "aten.clone.default")
USUAL = (None, 1, -100, 0.0)
"""Defaults of the loss: weight of classes, reduction, ignored target, label smoothing."""
LARGE = 1 << 25
"""Bytes of logits from which on a loss is rewritten, and of those that exist at once then."""


def without_logits(
    nodes: Sequence[OperatorCall], values: MutableMapping[str, Value], batch: int
) -> tuple[OperatorCall, ...]:
    """`nodes` with each large loss rewritten; `values` gets the specs of what changes. `batch`: samples of a
    full microbatch. Calls that nothing reads any more are left in.
    """
    by_name = {node.name: node for node in nodes}
    readers = Counter(name for node in nodes for name in node.references())
    changed: dict[str, OperatorCall] = {}
    for node in nodes:
        if node.op == LOSS and (found := _head(node, by_name, readers, values)) and found.size(batch) > LARGE:
            changed |= found.rewritten(node, values)
    return tuple(changed.get(node.name, node) for node in nodes)


@dataclass(frozen=True, slots=True)
class _Head:
    """The linear layer before a loss, and the calls between the two, from the layer on."""

    linear: OperatorCall
    between: tuple[OperatorCall, ...]
    logits: TensorSpec
    """Spec of the logits that enter the loss: [tokens, classes]."""
    entering: TensorSpec
    """Spec of the tensor that enters the layer: […, width]."""

    @property
    def classes(self) -> int:
        return TensorSpec(shape=self.logits.shape[1:], dtype=self.logits.dtype).count

    def size(self, batch: int) -> int:
        """Bytes of the logits as float32."""
        return ITEM_BYTES["float32"] * self.logits.at(batch).count

    def rewritten(self, loss: OperatorCall, values: MutableMapping[str, Value]) -> dict[str, OperatorCall]:
        """Name → call that stands for the one of that name, in the order of the program."""
        (width,) = self.entering.shape[-1:]
        x, weight = self.linear.args[:2]
        changed: dict[str, OperatorCall] = {}
        for call in self.between:
            if call.op in (CAST, *COPIES):
                continue
            spec = values[call.name]
            assert isinstance(spec, TensorSpec)
            values[call.name] = TensorSpec(shape=(*spec.shape[:-1], width), dtype=self.entering.dtype)
            args = (x, *call.args[1:]) if call.op == SLICE else (x, (*spec.shape[:-1], width))
            op = SLICE if call.op == SLICE else VIEWS[0]
            changed[call.name], x = replace(call, op=op, args=args, kwargs={}), Ref(call.name)
        ignored = loss.args[4] if len(loss.args) > 4 else USUAL[2]
        rows = max(1, LARGE // (ITEM_BYTES["float32"] * self.classes))
        args = (x, weight, loss.args[1], ignored, rows)
        changed[loss.name] = replace(loss, op=LINEAR_LOSS, args=args, kwargs={})
        return changed


def _head(
    loss: OperatorCall,
    by_name: MutableMapping[str, OperatorCall],
    readers: Counter[str],
    values: MutableMapping[str, Value],
) -> _Head | None:
    """The linear layer before `loss`; None if there is another pattern, or if others read the logits."""
    rest = (*loss.args[2:], *USUAL[len(loss.args) - 2 :])
    if loss.kwargs or (rest[0], rest[1], rest[3]) != (USUAL[0], USUAL[1], USUAL[3]):
        return None
    between: list[OperatorCall] = []
    name = loss.args[0]
    while isinstance(name, Ref) and name.name in by_name and readers[name.name] == 1:
        call = by_name[name.name]
        if call.op == LINEAR:
            return _with_specs(loss, call, between[::-1], values)
        if not _moves_rows(call, values):
            return None
        between.append(call)
        name = call.args[0]
    return None


def _with_specs(
    loss: OperatorCall,
    linear: OperatorCall,
    between: Sequence[OperatorCall],
    values: MutableMapping[str, Value],
) -> _Head | None:
    """The head if its layer has no bias, and what enters the loss is [tokens, classes]."""
    logits, x, target = loss.args[0], linear.args[0], loss.args[1]
    if len(linear.args) > 2 or not all(isinstance(one, Ref) for one in (logits, x, target)):
        return None
    specs = [values.get(one.name) for one in (logits, x) if isinstance(one, Ref)]
    first, entering = specs
    if not isinstance(first, TensorSpec) or not isinstance(entering, TensorSpec) or len(first.shape) != 2:
        return None
    return _Head(linear, tuple(between), first, entering) if isinstance(first.shape[1], int) else None


def _moves_rows(call: OperatorCall, values: MutableMapping[str, Value]) -> bool:
    """Whether `call` leaves each row of classes as it is: a cast to float32, a view, a slice elsewhere."""
    result, given = values[call.name], call.args[0]
    before = values.get(given.name) if isinstance(given, Ref) else None
    if not isinstance(result, TensorSpec) or not isinstance(before, TensorSpec):
        return False
    if call.op == CAST:
        return call.kwargs == {"dtype": Symbol("dtype", "float32")}
    if call.op == SLICE:
        return call.args[1:2] not in ((-1,), (len(before.shape) - 1,)) and len(call.args) > 1
    return call.op in (*VIEWS, *COPIES) and result.shape[-1] == before.shape[-1]
