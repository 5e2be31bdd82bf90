"""Blocks as bytes: canonical msgpack, so that equal blocks have equal bytes and one hash.

A block may come from a stranger: the bytes are read under `GraphLimits`, and every unexpected entry is a
ProtocolError. There is no pickle, no eval and no torch here. A name becomes a call only through the literal
table in operators.py, after safety_check.py has judged the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgpack

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack
from hetpeer.stages.graph.block_spec import (
    ITEM_BYTES,
    Argument,
    Batch,
    BlockSpec,
    OperatorCall,
    Ref,
    Size,
    Symbol,
    TensorSpec,
)
from hetpeer.stages.graph.structure_check import DEFAULT_LIMITS, GraphLimits, check_structure

VERSION = 1


def pack_block(spec: BlockSpec) -> bytes:
    """The block's canonical bytes: maps sorted by key, ordered things as lists of pairs."""
    document = {
        "version": VERSION,
        "index": spec.index,
        "inputs": _pack_specs(spec.inputs),
        "outputs": _pack_specs(spec.outputs),
        "data": _pack_specs(spec.data),
        "nodes": [
            [
                node.name,
                node.op,
                [_pack_argument(argument) for argument in node.args],
                {key: _pack_argument(node.kwargs[key]) for key in sorted(node.kwargs)},
            ]
            for node in spec.nodes
        ],
        "parameters": {name: spec.parameters[name] for name in sorted(spec.parameters)},
        "parameter_specs": _pack_specs(spec.parameter_specs),
        "buffers": {name: spec.buffers[name] for name in sorted(spec.buffers)},
        "buffer_specs": _pack_specs(spec.buffer_specs),
        "statistics": {name: spec.statistics[name] for name in sorted(spec.statistics)},
        "statistic_specs": _pack_specs(spec.statistic_specs),
        "batch": spec.batch,
        "autocast": spec.autocast,
        "recompute": spec.recompute,
        "flops_forward": spec.flops_forward,
        "activation_bytes": spec.activation_bytes,
        "loss": spec.loss,
    }
    packed: bytes = msgpack.packb({key: document[key] for key in sorted(document)})
    return packed


def read_block(data: bytes, limits: GraphLimits = DEFAULT_LIMITS) -> BlockSpec:
    """The block, checked for consistency. Raises ProtocolError.

    This is enough to pass a block on. Before running one, `safety_check.unpack_block` checks its operators
    and shapes.
    """
    if len(data) > limits.packed_bytes:
        raise ProtocolError(f"a block of {len(data)} bytes is over the limit of {limits.packed_bytes}")
    document = unpack(
        data,
        "a block",
        max_array_len=limits.items,
        max_map_len=limits.items,
        max_str_len=limits.name_length,
        max_bin_len=0,
        max_ext_len=0,
    )
    spec = _Reader(limits).block(document)
    try:
        canonical = pack_block(spec) == data
    except (OverflowError, UnicodeEncodeError) as error:
        raise ProtocolError("a block holds a value that cannot be packed", why=str(error)) from error
    if not canonical:
        raise ProtocolError("a block is not in canonical form")
    check_structure(spec, limits)
    return spec


def _pack_specs(specs: Mapping[str, TensorSpec]) -> list[Any]:
    return [
        [name, [list(map(_pack_size, spec.shape)), spec.dtype, spec.grad]] for name, spec in specs.items()
    ]


def _pack_size(size: Size) -> Any:
    return {"batch": size.multiple} if isinstance(size, Batch) else size


def _pack_argument(argument: Argument) -> Any:
    """Plain data for `argument`; `_Reader._argument` reads it."""
    if isinstance(argument, Batch):
        return _pack_size(argument)
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Symbol):
        return {argument.kind: argument.value}
    if isinstance(argument, tuple):
        return [_pack_argument(item) for item in argument]
    return argument


class _Reader:
    """Turns plain msgpack values into a BlockSpec and trusts none of them."""

    def __init__(self, limits: GraphLimits) -> None:
        self._limits = limits

    def block(self, document: Any) -> BlockSpec:
        """The block in `document`. Raises `ProtocolError` for anything that `pack_block` would not write."""
        entries = self._pairs(document, "a block")
        known = {"version", *(field.name for field in fields(BlockSpec))}
        if entries.keys() != known:
            raise ProtocolError(
                f"a block has the wrong entries: {sorted(map(repr, entries.keys() ^ known))[:5]}"
            )
        if self._count(entries["version"], "version") != VERSION:
            raise ProtocolError(f"a block is of version {entries['version']}, this peer reads {VERSION}")
        return BlockSpec(
            index=self._count(entries["index"], "index"),
            inputs=self._specs(entries["inputs"], "inputs"),
            outputs=self._specs(entries["outputs"], "outputs"),
            data=self._specs(entries["data"], "data"),
            nodes=tuple(map(self._node, self._list(entries["nodes"], "nodes"))),
            parameters=self._names(entries["parameters"], "parameters"),
            parameter_specs=self._specs(entries["parameter_specs"], "parameter_specs"),
            buffers=self._names(entries["buffers"], "buffers"),
            buffer_specs=self._specs(entries["buffer_specs"], "buffer_specs"),
            statistics=self._names(entries["statistics"], "statistics"),
            statistic_specs=self._specs(entries["statistic_specs"], "statistic_specs"),
            batch=self._count(entries["batch"], "batch"),
            autocast=self._flag(entries["autocast"], "autocast"),
            recompute=self._flag(entries["recompute"], "recompute"),
            flops_forward=self._count(entries["flops_forward"], "flops_forward"),
            activation_bytes=self._count(entries["activation_bytes"], "activation_bytes"),
            loss=None if entries["loss"] is None else self._name(entries["loss"], "loss"),
        )

    def _node(self, value: Any) -> OperatorCall:
        """A call from [name, operator, arguments, named arguments]."""
        name, op, args, kwargs = self._list(value, "a node", length=4)
        return OperatorCall(
            name=self._name(name, "a node's name"),
            op=self._name(op, "an operator"),
            args=tuple(self._argument(item, 0) for item in self._list(args, "arguments")),
            kwargs={
                self._name(key, "an argument's name"): self._argument(item, 0)
                for key, item in self._pairs(kwargs, "named arguments").items()
            },
        )

    def _argument(self, value: Any, depth: int) -> Argument:
        """An argument at nesting `depth`; the counterpart of `_pack_argument`."""
        if value is None or type(value) in (bool, int, float):
            return value  # type: ignore[no-any-return]
        if type(value) is list:
            if depth == self._limits.nesting:
                raise ProtocolError(f"an argument is nested more than {depth} deep")
            return tuple(self._argument(item, depth + 1) for item in value)
        if type(value) is dict and len(value) == 1:
            ((kind, name),) = value.items()
            if kind == "batch":
                return self._size(value, "an argument")
            if kind == "ref":
                return Ref(self._name(name, "a reference"))
            return Symbol(self._name(kind, "an argument's kind"), self._text(name, "a symbol"))
        raise ProtocolError(f"an argument is a {type(value).__name__}")

    def _specs(self, value: Any, what: str) -> dict[str, TensorSpec]:
        """Name → tensor from [name, [shape, dtype, grad]] pairs."""
        specs: dict[str, TensorSpec] = {}
        for pair in self._list(value, what):
            name, spec = self._list(pair, what, length=2)
            name = self._name(name, what)
            shape, dtype, grad = self._list(spec, what, length=3)
            sides = tuple(self._size(side, f"a dimension in {what}") for side in self._list(shape, what))
            if 0 in sides or type(dtype) is not str or dtype not in ITEM_BYTES or type(grad) is not bool:
                raise ProtocolError(f"{what}: {name!r} is no tensor a block may use")
            if name in specs:
                raise ProtocolError(f"{what}: {name!r} is there twice")
            specs[name] = TensorSpec(shape=sides, dtype=dtype, grad=grad)
        return specs

    def _names(self, value: Any, what: str) -> dict[str, str]:
        return {
            self._name(key, what): self._name(item, what) for key, item in self._pairs(value, what).items()
        }

    def _list(self, value: Any, what: str, length: int | None = None) -> list[Any]:
        if type(value) is not list or (length is not None and len(value) != length):
            raise ProtocolError(f"{what}: a list is expected, not {type(value).__name__}")
        return value

    def _pairs(self, value: Any, what: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise ProtocolError(f"{what}: a map is expected, not {type(value).__name__}")
        return value

    def _count(self, value: Any, what: str) -> int:
        if type(value) is not int or value < 0:
            raise ProtocolError(f"{what}: a count is expected, not {type(value).__name__}")
        return value

    def _size(self, value: Any, what: str) -> Size:
        if type(value) is not dict:
            return self._count(value, what)
        if value.keys() != {"batch"} or self._count(value["batch"], what) == 0:
            raise ProtocolError(f"{what}: a multiple of the batch is expected")
        return Batch(value["batch"])

    def _flag(self, value: Any, what: str) -> bool:
        if type(value) is not bool:
            raise ProtocolError(f"{what}: yes or no is expected, not {type(value).__name__}")
        return value

    def _text(self, value: Any, what: str) -> str:
        if type(value) is not str:
            raise ProtocolError(f"{what}: a text is expected, not {type(value).__name__}")
        return value

    def _name(self, value: Any, what: str) -> str:
        if not self._text(value, what).isprintable() or not value:
            raise ProtocolError(f"{what}: {value!r} is no name")
        return str(value)
