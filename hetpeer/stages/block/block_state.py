"""One block's training state as a file, for the initial state, checkpoints and transfers between holders.

The file is safetensors: a float32 tensor `<name>` for each parameter and each running statistic of BatchNorm,
one `exp_avg:<name>` and the like for each vector of the optimizer's state (left out while it is zero), and
one metadata entry, `state: "block 2 version 40"`. There is one entry because safetensors writes several in
random order, and equal states must be equal bytes: a file is fetched from several holders at once. In memory
all are flat vectors in the order of the block's layout (names and shapes), on which optimizer and reduce
work. No torch here: daemon and coordinator read and check states too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import SAFETENSORS, BlockSpec, TensorSpec

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
"""A flat float32 vector: a block's parameters (or their optimizer state) in order, then statistics."""

Layout = Sequence[tuple[str, tuple[int, ...]]]
"""(name, shape) of a block's parameters and then of its statistics, in the order of its spec."""

FLOAT32 = np.dtype("<f4")
HEADER_BYTES_PER_TENSOR = 256
"""Most bytes of a tensor's JSON entry besides its name; bounds the header before it is parsed."""
LABEL = re.compile(
    r"block (?P<block>[0-9]{1,9}) version (?P<version>[0-9]{1,15})"
    r"(?: averages (?P<averages>[1-9][0-9]{0,14}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """One block at `version`. Each update is a version, and in a grouped run each averaging: `averages` of
    them.

        state = load(data, block=2, layout=layout_of(spec), kept=("exp_avg", "exp_avg_sq"))
        data = dump(state, 2, layout_of(spec))
    """

    version: int
    parameters: Vector
    optimizer: Mapping[str, Vector] = field(default_factory=dict)
    """Optimizer state by torch's names (`exp_avg`), each as long as `parameters`; absent vectors are zero.

    At version 0 there is none, whatever the rules begin with.
    """
    averages: int = 0

    def vectors(self) -> dict[str, Vector]:
        """The parameters as "", and the optimizer's vectors that are not zero, by name in order."""
        kept = {name: self.optimizer[name] for name in sorted(self.optimizer)}
        return {"": self.parameters} | {name: vector for name, vector in kept.items() if not _is_zero(vector)}

    def digest(self) -> str:
        """Blake3 (64 hex digits) of `vectors`, each its name and little-endian float32 ‖ version as u64.

        ‖ averages as u64, if there were any.
        """
        hasher = blake3()
        for name, vector in self.vectors().items():
            hasher.update(name.encode())
            hasher.update(np.ascontiguousarray(vector, dtype=FLOAT32).data.cast("B"))
        for number in (self.version, *([self.averages] if self.averages else [])):
            hasher.update(number.to_bytes(8, "little"))
        return hasher.hexdigest()


def layout_of(spec: BlockSpec) -> Layout:
    """The layout of a block's state."""
    return [
        (name, tensor.sizes)
        for specs in (spec.parameter_specs, spec.statistic_specs)
        for name, tensor in specs.items()
    ]


def element_count(layout: Layout) -> int:
    """Number of float32 values in one vector of a block."""
    return sum(math.prod(shape) for _, shape in layout)


def split(
    vector: Vector, layout: Layout
) -> Iterator[tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    """(name, its part of the flat vector as a view in its shape), for each tensor of the layout."""
    begin = 0
    for name, shape in layout:
        end = begin + math.prod(shape)
        yield name, vector[begin:end].reshape(shape)
        begin = end


def dump(state: BlockState, block: int, layout: Layout) -> bytes:
    """`state` as a safetensors file; the label names its averagings if there were any.

    Raises ValueError if a vector does not have the layout's length.
    """
    expected = element_count(layout)
    tensors = {}
    for kind, vector in state.vectors().items():
        if vector.shape != (expected,):
            raise ValueError(f"block {block} has {expected} parameters, the vector {vector.shape}")
        for name, part in split(np.ascontiguousarray(vector, dtype=FLOAT32), layout):
            tensors[tensor_name(kind, name)] = part
    averages = f" averages {state.averages}" if state.averages else ""
    label = f"block {block} version {state.version}{averages}"
    data: bytes = save(tensors, metadata={"state": label})
    return data


def load(data: bytes, block: int, layout: Layout, kept: Sequence[str]) -> BlockState:
    """Parse and check a state from outside; `kept` names all vectors of the run's optimizer.

    Raises `ProtocolError`, and nothing else, if size, names, dtypes, shapes, block or version differ from the
    layout, or if a value is not finite.
    """
    _check_sizes(data, layout, 1 + len(kept))
    try:
        found = dict(deserialize(data))  # type: ignore[no-untyped-call]
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    except (SafetensorError, ValueError) as error:
        raise ProtocolError(f"state of block {block} is not a safetensors file", why=str(error)) from error
    version, averages = _read_version(metadata, block)
    parameters = _take_vector(found, "", layout)
    there = [kind for kind in kept if any(tensor_name(kind, name) in found for name, _ in layout)]
    optimizer = {kind: _take_vector(found, kind, layout) for kind in there}
    if found:
        raise ProtocolError(f"state of block {block} holds a tensor nobody asked for: {min(found)[:80]!r}")
    return BlockState(version=version, parameters=parameters, optimizer=optimizer, averages=averages)


def load_constants(data: bytes, specs: Mapping[str, TensorSpec]) -> dict[str, bytes]:
    """The raw bytes of a block's constant tensors, by name, from a file from outside.

    Raises `ProtocolError`, and nothing else, if it is no safetensors file, or lacks a tensor of `specs` with
    that dtype and shape.
    """
    try:
        found = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        raise ProtocolError("the constants are not a safetensors file", why=str(error)) from error
    constants = {}
    for name, spec in specs.items():
        entry = found.get(name, {"dtype": "nothing", "shape": []})
        if entry["dtype"] != SAFETENSORS[spec.dtype] or tuple(entry["shape"]) != spec.shape:
            what = f"the constant {name[:80]!r} is {entry['dtype']} {entry['shape']}"
            raise ProtocolError(f"{what}, not {spec.dtype} {spec.shape}")
        constants[name] = bytes(entry["data"])
    return constants


def file_bytes(layout: Layout, vectors: int) -> int:
    """Most bytes of a state file with `vectors` vectors."""
    return 8 + _header_bytes(layout, vectors) + vectors * FLOAT32.itemsize * element_count(layout)


def _header_bytes(layout: Layout, vectors: int) -> int:
    """Most bytes of the JSON header: 256 for the metadata, and an entry for each tensor.

    JSON needs at most 6 bytes for each character of a name.
    """
    return 256 + sum(vectors * (HEADER_BYTES_PER_TENSOR + 6 * len(name)) for name, _ in layout)


def _is_zero(vector: Vector) -> bool:
    """Whether the vector is zero; the first elements decide nearly always, without reading all of it."""
    return not vector[:1024].any() and not vector.any()


def tensor_name(kind: str, name: str) -> str:
    """Name in the file of parameter `name`'s part of the vector `kind`; `kind` "": the parameters."""
    return f"{kind}:{name}" if kind else name


def _check_sizes(data: bytes, layout: Layout, vectors: int) -> None:
    """Refuse by size alone, before a byte is parsed."""
    header = int.from_bytes(data[:8], "little")
    payload = vectors * FLOAT32.itemsize * element_count(layout)
    if len(data) < 8 or header > _header_bytes(layout, vectors) or len(data) > 8 + header + payload:
        raise ProtocolError(f"state of {len(data)} bytes does not fit a block of {payload} bytes")


def _read_version(metadata: dict[str, str], block: int) -> tuple[int, int]:
    """(version, number of averagings in it)."""
    match = LABEL.fullmatch(metadata.get("state", ""))
    if match is None:
        raise ProtocolError("state does not say which block and version it is")
    if match["block"] != str(block):
        raise ProtocolError(f"state is of block {match['block']}, not of block {block}")
    version, averages = int(match["version"]), int(match["averages"] or 0)
    if averages > version:
        raise ProtocolError(f"state says that {averages} of {version} updates were averagings")
    return version, averages


def _take_vector(found: dict[str, dict[str, object]], kind: str, layout: Layout) -> Vector:
    """Remove one kind of tensors from `found` and return them as a flat vector."""
    vector = np.empty(element_count(layout), dtype=np.float32)
    for name, part in split(vector, layout):
        entry = found.pop(tensor_name(kind, name), None)
        if entry is None:
            raise ProtocolError(f"state lacks {tensor_name(kind, name)[:80]!r}")
        if entry["dtype"] != "F32" or tuple(entry["shape"]) != part.shape:  # type: ignore[arg-type]
            raise ProtocolError(
                f"{tensor_name(kind, name)[:80]!r} is {entry['dtype']} {entry['shape']}, not F32 {part.shape}"
            )
        part[...] = np.frombuffer(entry["data"], dtype=FLOAT32).reshape(part.shape)  # type: ignore[call-overload]
    if not np.isfinite(vector).all():
        raise ProtocolError(f"state holds values that are not finite in {kind or 'the parameters'}")
    return vector
