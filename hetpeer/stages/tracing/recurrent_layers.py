"""An LSTM or GRU of several layers as one call for each layer, so that a block may begin between them.

torch computes the layers one after the other as well, so the numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpeer.stages.graph.block_spec import Argument, OperatorCall, Ref, TensorSpec, Value
from hetpeer.stages.tracing.rewrite import Rewriter

RECURRENT = ("aten.lstm.input", "aten.gru.input")
"""[input, state, weights, bias, layers, dropout, train, both ways, batch first]; a GRU has one state."""
CAT, GETITEM, SLICE = "aten.cat.default", "getitem", "aten.slice.Tensor"


def split_layers(rewriter: Rewriter) -> None:
    """Replace each recurrent call of several layers in `rewriter`, and what reads its results."""
    stacks: dict[str, _Stack] = {}
    nodes: list[OperatorCall] = []
    for node in rewriter.nodes:
        source = node.args[0] if node.args else None
        if node.op in RECURRENT and isinstance(node.args[4], int) and node.args[4] > 1:
            stacks[node.name] = _Stack(rewriter, node)
            nodes += stacks[node.name].layers()
        elif node.op == GETITEM and isinstance(source, Ref) and source.name in stacks:
            nodes.append(stacks[source.name].part(node))
        else:
            nodes.append(node)
    rewriter.nodes[:] = nodes


@dataclass(frozen=True, slots=True)
class _Stack:
    """A recurrent call of several layers."""

    rewriter: Rewriter
    call: OperatorCall

    @property
    def count(self) -> int:
        """Number of layers."""
        layers = self.call.args[4]
        assert isinstance(layers, int)
        return layers

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """Specs of a layer's results: outputs, and its part of each last state."""
        results = self.rewriter.values[self.call.name]
        assert isinstance(results, tuple)
        outputs, *states = results
        ways = 2 if self.call.args[7] else 1
        return outputs, *(replace(state, shape=(ways, *state.shape[1:])) for state in states)

    def layers(self) -> list[OperatorCall]:
        """The calls of all layers, each with its parts of the first state and the weights."""
        x, state, weights, *rest = self.call.args
        assert isinstance(weights, tuple)
        states, size = state if isinstance(state, tuple) else (state,), len(weights) // self.count
        made: list[OperatorCall] = []
        for layer in range(self.count):
            name = self._name(layer)
            own: list[Argument] = []
            ways = self.results[1].shape[0]
            assert isinstance(ways, int)
            for number, whole in enumerate(states):
                cut = (whole, 0, layer * ways, (layer + 1) * ways)
                made.append(self._made(f"{name}_from_{number}", SLICE, cut, self.results[1 + number]))
                own.append(Ref(made[-1].name))
            first = tuple(own) if isinstance(state, tuple) else own[0]
            part = weights[layer * size : (layer + 1) * size]
            args = (x, first, part, rest[0], 1, *rest[2:])
            made.append(self._made(name, self.call.op, args, self.results))
            for number, result in enumerate(self.results):  # at once: a tuple may not cross a border
                made.append(self._made(f"{name}_{number}", GETITEM, (Ref(name), number), result))
            x = Ref(f"{name}_0")
        return made

    def part(self, node: OperatorCall) -> OperatorCall:
        """What replaces `node`, which picks one result: the last layer's outputs, or all layers' states."""
        if node.args[1] == 0:
            return replace(node, args=(Ref(self._name(self.count - 1)), 0))
        states = tuple(Ref(f"{self._name(layer)}_{node.args[1]}") for layer in range(self.count))
        return replace(node, op=CAT, args=(states, 0))

    def _name(self, layer: int) -> str:
        return f"{self.call.name}_layer_{layer}"

    def _made(self, name: str, op: str, args: Sequence[Argument], value: Value) -> OperatorCall:
        """A new call, noted in the rewriter."""
        self.rewriter.values[name] = value
        self.rewriter.lines[name] = self.rewriter.lines[self.call.name]
        return OperatorCall(name=name, op=op, args=tuple(args), kwargs={})
