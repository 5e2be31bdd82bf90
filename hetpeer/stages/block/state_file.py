"""One block's state as a file, for the initial state, checkpoints and transfers between holders.

The file is safetensors: a float32 tensor `<name>` for each parameter and each running statistic of BatchNorm,
one `exp_avg:<name>` and the like for each vector of the optimizer's state (left out while it is zero), and
one metadata entry, `state: "block 2 version 40"`. There is one entry because safetensors writes several in
random order, and equal states must be equal bytes: a file is fetched from several holders at once.

It is read and written in pieces (`StateFile`, `write_state`), since it has up to 12 bytes a parameter.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.file_pieces import InMemory, Readable, Writable
from hetpeer.stages.block.block_state import (
    FLOAT32,
    BlockState,
    Joined,
    Layout,
    Numbers,
    State,
    Vector,
    digest_of,
    element_count,
    in_memory,
    pieces_of,
    without_zeros,
)
from hetpeer.stages.block.tensor_file import (
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    header_of,
    read_tensors,
)

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
    label = f"block {block} version {state.version}{averaged}"
    header = header_of([(place.name, "F32", place.shape) for place in places], {"state": label})
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
        _check_size(source, layout, 1 + len(kept))
        tensors, metadata = read_tensors(source, f"the state of block {block}")
        self.version, self.averages = _read_version(metadata, block)
        there = [kind for kind in kept if any(tensor_name(kind, name) in tensors for name, _ in layout)]
        self.vectors: dict[str, Numbers] = {}
        """The parameters as "", and the optimizer's vectors that are there, by name."""
        for kind in ("", *there):
            parts = [_take_tensor(tensors, tensor_name(kind, name), shape) for name, shape in layout]
            self.vectors[kind] = Joined([_StoredNumbers(part, kind) for part in parts])
        if tensors:
            raise ProtocolError(
                f"state of block {block} holds a tensor nobody asked for: {min(tensors)[:80]!r}"
            )

    def numbers(self) -> Mapping[str, Numbers]:
        """The vectors, read in pieces; reading raises as `digest`."""
        return self.vectors

    def digest(self) -> str:
        """`BlockState.digest` of the content. Raises OSError, `ProtocolError` if a value is not finite."""
        return digest_of(self.vectors, self.version, self.averages)

    def state(self) -> BlockState:
        """The state in memory. Raises as `digest`."""
        vectors = {kind: in_memory(numbers) for kind, numbers in self.vectors.items()}
        return BlockState(
            version=self.version,
            parameters=vectors.pop(""),
            optimizer=vectors,
            averages=self.averages,
        )


class _StoredNumbers:
    """A tensor of a state in its file; `kind` names its vector in errors."""

    def __init__(self, tensor: StoredTensor, kind: str) -> None:
        self._tensor = tensor
        self._what = kind or "the parameters"
        self.count = math.prod(tensor.shape)

    def read(self, begin: int, end: int) -> Vector:
        """Elements [begin, end). Raises `ProtocolError` if one is not finite, OSError."""
        values = np.empty(end - begin, dtype=FLOAT32)
        if begin < end:
            self._tensor.read_into(FLOAT32.itemsize * begin, values.data.cast("B"))
        if not np.isfinite(values).all():
            raise ProtocolError(f"state holds values that are not finite in {self._what}")
        return values


def load(data: Any, block: int, layout: Layout, kept: Sequence[str]) -> BlockState:
    """The state in a file in memory. Raises `ProtocolError`, and nothing else, as `StateFile` does."""
    return StateFile(InMemory(data), block, layout, kept).state()


def _check_size(source: Readable, layout: Layout, vectors: int) -> None:
    """Refuse by size alone, before a byte is parsed."""
    payload, length = vectors * FLOAT32.itemsize * element_count(layout), header_length(source)
    most = _header_bytes(layout, vectors)
    if length is None or length > most or source.nbytes - LENGTH_BYTES - length > payload:
        raise ProtocolError(f"state of {source.nbytes} bytes does not fit a block of {payload} bytes")


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


def _take_tensor(tensors: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Remove a tensor from `tensors`, and check it."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ProtocolError(f"state lacks {name[:80]!r}")
    if (tensor.dtype, tensor.shape) != ("F32", tuple(shape)):
        raise ProtocolError(f"{name[:80]!r} is {tensor.dtype} {tensor.shape}, not F32 {shape}")
    return tensor


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
