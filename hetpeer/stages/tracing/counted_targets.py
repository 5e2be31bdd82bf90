"""Targets that count in a model's mean loss, found in its graph (docs/data.md, "Weights").

torch's cross entropy takes the mean over the targets that are not `ignore_index`, each with the weight of its
class. So a microbatch's loss is a mean over another number of targets than the next one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.target_hits import LOSSES, ignored_target
from hetpeer.stages.data.sample_weights import Weights
from hetpeer.stages.data.shards import Array, Arrays
from hetpeer.stages.graph.block_spec import OperatorCall, Ref
from hetpeer.stages.graph.interpreter import Program
from hetpeer.stages.operators.chunked_loss import LINEAR_LOSS
from hetpeer.stages.operators.operators import operator_of
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.tracing.trace import OpDag

MEAN, MANY = 1, 256
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Loss:
    """Values that decide which targets count: the targets, the weights of classes, the ignored target."""

    target: str
    classes: str | None
    ignored: int


class CountedTargets:
    """The targets of `loss` in the model of `dag`, which the calls `nodes` make of a sample's arrays."""

    def __init__(
        self, dag: OpDag, loss: _Loss, nodes: Sequence[OperatorCall], example: Mapping[str, Tensor]
    ) -> None:
        self._loss, self._nodes = loss, nodes
        self._size = MANY if dag.dynamic else dag.batch
        """Samples whose targets are computed at once."""
        read = {name for node in nodes for name in node.references()} | {loss.target, loss.classes}
        self._constants = {value: dag.tensors[name] for value, name in dag.buffers.items() if value in read}
        self._inputs = [name for name in dag.inputs if name in read]
        if not self._are_by_sample(example):
            raise ProtocolError("targets are not in the order of the samples")

    def weights(self, rows: Arrays) -> Weights:
        """Weight of each sample of `rows` (name → array [samples, …]): its targets that count."""
        samples, size = len(next(iter(rows.values()))), self._size
        parts = []
        for begin in range(0, samples, size):
            there = min(size, samples - begin)
            part = {name: _filled(rows[name][begin : begin + there], size) for name in self._inputs}
            targets, classes = self._targets(part, size)
            counts = targets != self._loss.ignored
            weights = counts if classes is None else classes[targets.where(counts, 0)] * counts
            parts.append(weights.reshape(size, -1).sum(1)[:there].to(torch.float32))
        return torch.cat(parts).numpy()

    def _targets(self, inputs: Mapping[str, Tensor], samples: int) -> tuple[Tensor, Tensor | None]:
        """Targets of so many samples, and the weights of classes if there are any."""
        loss, values = self._loss, {**self._constants, **inputs}
        keep = [name for name in (loss.target, loss.classes) if name is not None]
        program = Program([node.at(samples) for node in self._nodes], keep, CPU)
        with torch.no_grad():
            found = program.run(values, Pass(None))
        return found[loss.target], None if loss.classes is None else found[loss.classes]

    def _are_by_sample(self, example: Mapping[str, Tensor]) -> bool:
        """Whether targets are whole numbers, and those of a sample stand together in the samples' order."""
        given = {name: example[name] for name in self._inputs}
        samples = len(next(iter(example.values())))
        targets, _ = self._targets(given, samples)
        if targets.is_floating_point() or targets.numel() % samples:
            return False
        turned, _ = self._targets({name: tensor.flip(0) for name, tensor in given.items()}, samples)
        here, there = (each.reshape(samples, -1) for each in (targets, turned))
        return torch.equal(here.flip(0), there)


def _filled(rows: Array, samples: int) -> Tensor:
    """`rows`, repeated until there are `samples`: a graph may be of one size only."""
    return torch.from_numpy(np.resize(rows, (samples, *rows.shape[1:])))


def counted_targets(dag: OpDag, example: Mapping[str, Tensor]) -> CountedTargets | None:
    """The targets that count in the loss of `dag`; None if it has no such loss, or several that differ.

    Targets must follow from a sample's arrays and constants alone. `example` is the first microbatch.
    """
    losses = {_described(node) for node in dag.nodes if node.op in (*LOSSES, LINEAR_LOSS)}
    loss = losses.pop() if len(losses) == 1 else None
    if loss is None:
        return None
    wanted, nodes = {loss.target, loss.classes} - {None}, []
    for node in reversed(dag.nodes):
        if node.name in wanted:
            if operator_of(node.op).in_pass:
                return None
            wanted.update(node.references())
            nodes.append(node)
    if wanted & {*dag.parameters, *dag.statistics}:
        return None
    try:
        return CountedTargets(dag, loss, nodes[::-1], example)
    except ProtocolError:
        return None


def _described(node: OperatorCall) -> _Loss | None:
    """The mean loss of this call; None if it is no mean, or its target is no value of the graph."""
    if node.op == LINEAR_LOSS:
        _, _, target, ignored, _ = node.args
        return (
            _Loss(target.name, None, ignored)
            if isinstance(target, Ref) and isinstance(ignored, int)
            else None
        )
    names = ("weight", "reduction")
    given = {**dict(zip(names, node.args[2:4], strict=False)), **node.kwargs}
    target, classes = node.args[1], given.get("weight")
    ignored, reduction = ignored_target(node), given.get("reduction", MEAN)
    if not isinstance(target, Ref) or ignored is None or reduction != MEAN:
        return None
    return _Loss(target.name, classes.name if isinstance(classes, Ref) else None, ignored)
