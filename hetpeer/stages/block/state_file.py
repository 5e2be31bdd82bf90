"""One block's state as a file, for the initial state, checkpoints and transfers between holders.

The file is safetensors: a float32 tensor `<name>` for each parameter and each running statistic of BatchNorm,
one `exp_avg:<name>` and the like for each vector of the optimizer's state (left out while it is zero), and
one metadata entry, `state: "block 2 version 40"`. There is one entry because safetensors writes several in
random order, and equal states must be equal bytes: a file is fetched from several holders at once.

It is read and written in pieces (`StateFile`, `write_state`), since it has up to 12 bytes a parameter.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.file_pieces import InMemory, Readable, Writable, read
from hetpeer.stages.block.block_state import (
    FLOAT32,
    BlockState,
    Layout,
    Numbers,
    State,
    Vector,
    digest_of,
    element_count,
    pieces_of,
    without_zeros,
)
from hetpeer.stages.graph.block_spec import SAFETENSORS, TensorSpec

LENGTH_BYTES = 8
"""Bytes of the header's length, with which a file begins."""
HEADER_BYTES_PER_TENSOR = 256
"""Most bytes of a tensor's JSON entry besides its name; bounds the header before it is parsed."""
LABEL = re.compile(
    r"block (?P<block>[0-9]{1,9}) version (?P<version>[0-9]{1,15})"
    r"(?: averages (?P<averages>[1-9][0-9]{0,14}))?"
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes [begin, end) of the payload hold elements from `first` on of the vector `kind`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    first: int
    begin: int
    end: int


def _places(kinds: Sequence[str], layout: Layout) -> list[_Place]:
    """The tensors of a file in the order of their bytes: by name, as safetensors sorts them."""
    sizes = [math.prod(shape) for _, shape in layout]
    firsts = list(itertools.accumulate(sizes, initial=0))
    tensors = sorted(
        (tensor_name(kind, name), shape, kind, first, size)
        for kind in kinds
        for (name, shape), first, size in zip(layout, firsts, sizes, strict=False)
    )
    ends = list(itertools.accumulate(FLOAT32.itemsize * size for *_, size in tensors))
    return [
        _Place(name, shape, kind, first, end - FLOAT32.itemsize * size, end)
        for (name, shape, kind, first, size), end in zip(tensors, ends, strict=True)
    ]


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


def write_state(into: Writable, state: State, block: int, layout: Layout) -> int:
    """Write the file of a block's state piece by piece; returns its length in bytes.

    Vectors that are zero are left out. Raises OSError, and ValueError if a vector does not have the layout's
    length.
    """
    expected = element_count(layout)
    written = without_zeros(state.numbers())
    for numbers in written.values():
        if numbers.count != expected:
            raise ValueError(f"block {block} has {expected} parameters, the vector {numbers.count}")
    places = _places(list(written), layout)
    averaged = f" averages {state.averages}" if state.averages else ""
    header = _header(places, f"block {block} version {state.version}{averaged}")
    into.write(0, header)
    for place in places:
        part = _Slice(written[place.kind], place.first, (place.end - place.begin) // FLOAT32.itemsize)
        for begin, piece in pieces_of(part):
            into.write(len(header) + place.begin + FLOAT32.itemsize * begin, piece)
    return len(header) + (places[-1].end if places else 0)


@dataclass(frozen=True, slots=True)
class _Slice:
    """`count` elements of a vector from `first` on."""

    numbers: Numbers
    first: int
    count: int

    def read(self, begin: int, end: int) -> Vector:
        return self.numbers.read(self.first + begin, self.first + end)


def _header(places: Sequence[_Place], label: str) -> bytes:
    """Length and JSON header, byte for byte as safetensors writes them: padded to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"state": label}}
    for place in places:
        offsets = [place.begin, place.end]
        entries[place.name] = {"dtype": "F32", "shape": list(place.shape), "data_offsets": offsets}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class _Growing:
    """A file in memory that is as long as what was written."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, begin: int, data: Any) -> None:
        assert begin == len(self.data)
        self.data += memoryview(data).cast("B")


def dump(state: State, block: int, layout: Layout) -> bytes:
    """The file of `state` in memory. Raises as `write_state`."""
    into = _Growing()
    write_state(into, state, block, layout)
    return bytes(into.data)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


class StateFile:
    """A state from outside, checked before anything of its size is allocated.

    file = StateFile(part, 2, layout_of(spec), ("exp_avg", "exp_avg_sq"))
    digest = file.digest()  # in pieces
    state = file.state()  # in memory
    """

    def __init__(self, source: Readable, block: int, layout: Layout, kept: Sequence[str]) -> None:
        """`kept` names all vectors of the run's optimizer.

        Raises `ProtocolError` if size, names, dtypes, shapes, block or version differ from the layout, and
        OSError if `source` cannot be read.
        """
        length = _header_length(source, layout, 1 + len(kept))
        header = _parsed(bytes(read(source, LENGTH_BYTES, length)), block)
        self.version, self.averages = _read_version(header.pop("__metadata__", None), block)
        begins = _offsets(header, source.nbytes - LENGTH_BYTES - length)
        there = [kind for kind in kept if any(tensor_name(kind, name) in header for name, _ in layout)]
        self.vectors: dict[str, Numbers] = {}
        """The parameters as "", and the optimizer's vectors that are there, by name."""
        for kind in ("", *there):
            parts = [_take_tensor(header, tensor_name(kind, name), shape) for name, shape in layout]
            places = [LENGTH_BYTES + length + begins[part] for part in parts]
            self.vectors[kind] = _FileVector(source, places, [math.prod(shape) for _, shape in layout], kind)
        if header:
            raise ProtocolError(
                f"state of block {block} holds a tensor nobody asked for: {min(header)[:80]!r}"
            )

    def numbers(self) -> Mapping[str, Numbers]:
        """The vectors, read in pieces; reading raises as `digest`."""
        return self.vectors

    def digest(self) -> str:
        """`BlockState.digest` of the content. Raises OSError, `ProtocolError` if a value is not finite."""
        return digest_of(self.vectors, self.version, self.averages)

    def state(self) -> BlockState:
        """The state in memory. Raises as `digest`."""
        vectors = {kind: _in_memory(numbers) for kind, numbers in self.vectors.items()}
        return BlockState(
            version=self.version,
            parameters=vectors.pop(""),
            optimizer=vectors,
            averages=self.averages,
        )


class _FileVector:
    """A vector whose tensors lie apart in a file: at the bytes `places`, each of `sizes` elements."""

    def __init__(self, source: Readable, places: Sequence[int], sizes: Sequence[int], kind: str) -> None:
        self._source = source
        self._places = places
        self._firsts = list(itertools.accumulate(sizes, initial=0))
        self._what = kind or "the parameters"
        self.count = self._firsts[-1]

    def read(self, begin: int, end: int) -> Vector:
        """Elements [begin, end). Raises `ProtocolError` if one is not finite, OSError."""
        values = np.empty(end - begin, dtype=FLOAT32)
        at = begin
        tensor = bisect.bisect_right(self._firsts, begin) - 1
        while at < end:
            stop = min(self._firsts[tensor + 1], end)
            if stop > at:
                place = self._places[tensor] + FLOAT32.itemsize * (at - self._firsts[tensor])
                self._source.read_into(place, values[at - begin : stop - begin].data.cast("B"))
            at, tensor = stop, tensor + 1
        if not np.isfinite(values).all():
            raise ProtocolError(f"state holds values that are not finite in {self._what}")
        return values


def _in_memory(numbers: Numbers) -> Vector:
    vector = np.empty(numbers.count, dtype=np.float32)
    for begin, piece in pieces_of(numbers):
        vector[begin : begin + len(piece)] = piece
    return vector


def load(data: Any, block: int, layout: Layout, kept: Sequence[str]) -> BlockState:
    """The state in a file in memory. Raises `ProtocolError`, and nothing else, as `StateFile` does."""
    return StateFile(InMemory(data), block, layout, kept).state()


def _header_length(source: Readable, layout: Layout, vectors: int) -> int:
    """Length of the header. Refuses by size alone, before a byte is parsed."""
    payload = vectors * FLOAT32.itemsize * element_count(layout)
    length = 0
    if source.nbytes >= LENGTH_BYTES:
        length = int.from_bytes(read(source, 0, LENGTH_BYTES), "little")
    body = source.nbytes - LENGTH_BYTES - length
    if length > _header_bytes(layout, vectors) or not 0 <= body <= payload:
        raise ProtocolError(f"state of {source.nbytes} bytes does not fit a block of {payload} bytes")
    return length


def _parsed(text: bytes, block: int) -> dict[str, Any]:
    """The header's entries."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"state of block {block} is not a safetensors file", why=str(error)) from error
    if not isinstance(header, dict):
        raise ProtocolError(f"state of block {block} is not a safetensors file", why="its header is no map")
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON map in which no name comes twice. Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _refused(number: str) -> None:
    raise ValueError(f"{number} is no JSON")


def _offsets(header: Mapping[str, Any], payload: int) -> dict[str, int]:
    """Tensor → the byte of the payload at which it begins. They must fill `payload` bytes without a gap."""
    places = []
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
            raise ProtocolError(f"{name[:80]!r} does not say where it lies in the state")
        places.append((*offsets, name))
    end = 0
    for begin, stop, name in sorted(places):
        if begin != end or stop < begin or stop - begin != _tensor_bytes(header[name]):
            raise ProtocolError(f"{name[:80]!r} does not lie where it should in the state")
        end = stop
    if end != payload:
        raise ProtocolError(f"state has {payload} bytes for tensors of {end}")
    return {name: begin for begin, _, name in places}


def _tensor_bytes(entry: Mapping[str, Any]) -> int:
    shape = entry.get("shape")
    if entry.get("dtype") != "F32" or not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise ProtocolError(f"a tensor of the state is {entry.get('dtype')} {shape}, not F32")
    return FLOAT32.itemsize * math.prod(shape)


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _read_version(metadata: object, block: int) -> tuple[int, int]:
    """(version, number of averagings in it)."""
    label = metadata.get("state") if isinstance(metadata, dict) else None
    match = LABEL.fullmatch(label) if isinstance(label, str) else None
    if match is None:
        raise ProtocolError("state does not say which block and version it is")
    if match["block"] != str(block):
        raise ProtocolError(f"state is of block {match['block']}, not of block {block}")
    version, averages = int(match["version"]), int(match["averages"] or 0)
    if averages > version:
        raise ProtocolError(f"state says that {averages} of {version} updates were averagings")
    return version, averages


def _take_tensor(header: dict[str, Any], name: str, shape: tuple[int, ...]) -> str:
    """Remove an entry from `header`, and check it; returns its name."""
    entry = header.pop(name, None)
    if entry is None:
        raise ProtocolError(f"state lacks {name[:80]!r}")
    if tuple(entry["shape"]) != tuple(shape):
        raise ProtocolError(f"{name[:80]!r} is {entry['dtype']} {entry['shape']}, not F32 {shape}")
    return name


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
    payload = vectors * FLOAT32.itemsize * element_count(layout)
    return LENGTH_BYTES + _header_bytes(layout, vectors) + payload


def _header_bytes(layout: Layout, vectors: int) -> int:
    """Most bytes of the JSON header: 256 for the metadata, and an entry for each tensor.

    JSON needs at most 6 bytes for each character of a name.
    """
    return 256 + sum(vectors * (HEADER_BYTES_PER_TENSOR + 6 * len(name)) for name, _ in layout)


def tensor_name(kind: str, name: str) -> str:
    """Name in the file of parameter `name`'s part of the vector `kind`; `kind` "": the parameters."""
    return f"{kind}:{name}" if kind else name
