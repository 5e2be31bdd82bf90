"""An LSTM or GRU of several layers as one call for each layer, so that a block may begin between them.

torch computes the layers one after the other as well, so the numbers stay the same.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

from hetpeer.stages.graph.block_spec import Argument, OperatorCall, Ref, TensorSpec, Value

RECURRENT = ("aten.lstm.input", "aten.gru.input")
"""[input, state, weights, bias, layers, dropout, train, both ways, batch first]; a GRU has one state."""
CAT, GETITEM, SLICE = "aten.cat.default", "getitem", "aten.slice.Tensor"


def split_layers(
    nodes: Sequence[OperatorCall], values: MutableMapping[str, Value], lines: MutableMapping[str, str]
) -> list[OperatorCall]:
    """The calls, with each recurrent one of several layers replaced, and what reads its results.

    `values` and `lines` get the specs and the author's lines of new calls.
    """
    stacks: dict[str, _Stack] = {}
    result: list[OperatorCall] = []
    for node in nodes:
        source = node.args[0] if node.args else None
        if node.op in RECURRENT and isinstance(node.args[4], int) and node.args[4] > 1:
            stacks[node.name] = _Stack(node, values, lines)
            result += stacks[node.name].layers()
        elif node.op == GETITEM and isinstance(source, Ref) and source.name in stacks:
            result.append(stacks[source.name].part(node))
        else:
            result.append(node)
    return result


@dataclass(frozen=True, slots=True)
class _Stack:
    """A recurrent call of several layers."""

    call: OperatorCall
    values: MutableMapping[str, Value]
    lines: MutableMapping[str, str]

    @property
    def count(self) -> int:
        """Number of layers."""
        layers = self.call.args[4]
        assert isinstance(layers, int)
        return layers

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """Specs of a layer's results: outputs, and its part of each last state."""
        results = self.values[self.call.name]
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
        """Replacement of `node`, which picks one result: the last layer's outputs, or all layers' states."""
        if node.args[1] == 0:
            return replace(node, args=(Ref(self._name(self.count - 1)), 0))
        states = tuple(Ref(f"{self._name(layer)}_{node.args[1]}") for layer in range(self.count))
        return replace(node, op=CAT, args=(states, 0))

    def _name(self, layer: int) -> str:
        return f"{self.call.name}_layer_{layer}"

    def _made(self, name: str, op: str, args: Sequence[Argument], value: Value) -> OperatorCall:
        """A new call, with its spec and its line."""
        self.values[name] = value
        self.lines[name] = self.lines[self.call.name]
        return OperatorCall(name=name, op=op, args=tuple(args), kwargs={})
