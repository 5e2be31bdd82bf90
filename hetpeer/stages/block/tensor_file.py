"""Files of tensors in the format of safetensors, read and written in pieces.

8 bytes with the header's length, little-endian; the header, a JSON map padded with spaces to a multiple of 8;
then the tensors' bytes, one after the other without a gap. The header has name → dtype, shape and offsets,
and texts in `__metadata__`. safetensors itself reads files whole, or maps them, and so is not used for files
that are large or from outside (dht/base/file_pieces.py says why none is mapped).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.file_pieces import Readable, Writable, read
from hetpeer.stages.graph.block_spec import ITEM_BYTES, SAFETENSORS, TensorSpec

LENGTH_BYTES = 8
MOST_HEADER = 100_000_000
"""Most bytes of a header, as in safetensors."""
METADATA = "__metadata__"
_RANK = {
    name: rank
    for rank, name in enumerate(("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "C64", "F64", "I64"))
}
"""Order of dtypes in a file of safetensors, from the end of it."""
_ITEM_BYTES = {SAFETENSORS[name]: size for name, size in ITEM_BYTES.items()} | {"C64": 8}
"""Complex numbers are in models' own tables, and in no graph."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of `dtype` (as safetensors names it) and `shape` in `source`, from byte `begin` on."""

    source: Readable
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill `target` from byte `begin` of the tensor on. Raises OSError."""
        self.source.read_into(self.begin + begin, target)


def header_length(source: Readable) -> int | None:
    """Bytes of the header; None if the file is shorter than it says. Raises OSError."""
    if source.nbytes < LENGTH_BYTES:
        return None
    length = int.from_bytes(read(source, 0, LENGTH_BYTES), "little")
    return length if length <= min(source.nbytes - LENGTH_BYTES, MOST_HEADER) else None


def read_tensors(source: Readable, what: str) -> tuple[dict[str, StoredTensor], object]:
    """(name → tensor, the metadata) of a file from outside; `what` names it in errors.

    Nothing of the tensors' size is allocated. Raises `ProtocolError` if it is no such file, OSError.
    """
    length = header_length(source)
    if length is None:
        raise ProtocolError(f"{what} is not a safetensors file", why="its header is cut short")
    try:
        text = bytes(read(source, LENGTH_BYTES, length)).decode()
        header = json.loads(text, object_pairs_hook=_once, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is not a safetensors file", why=str(error)) from error
    if not isinstance(header, dict):
        raise ProtocolError(f"{what} is not a safetensors file", why="its header is no map")
    metadata = header.pop(METADATA, None)
    found, end = [], 0
    for name, entry in header.items():
        dtype, shape, (begin, stop) = _entry(name, entry, what)
        found.append((begin, stop, name, dtype, shape))
    payload = LENGTH_BYTES + length
    tensors = {}
    for begin, stop, name, dtype, shape in sorted(found):
        tensors[name] = tensor = StoredTensor(source, dtype, shape, payload + begin)
        if begin != end or stop - begin != tensor.nbytes:
            raise ProtocolError(f"{name[:80]!r} does not lie where it should in {what}")
        end = stop
    if payload + end != source.nbytes:
        raise ProtocolError(f"{what} has {source.nbytes - payload} bytes for tensors of {end}")
    return tensors, metadata


def read_constants(source: Readable, specs: Mapping[str, TensorSpec]) -> dict[str, StoredTensor]:
    """A block's constant tensors, by name, in a file from outside.

    Raises `ProtocolError` if it is no such file, or lacks a tensor of `specs` with that dtype and shape, and
    OSError.
    """
    found, _ = read_tensors(source, "the file of constants")
    constants = {}
    for name, spec in specs.items():
        tensor = found.get(name)
        if tensor is None:
            raise ProtocolError(f"the constant {name[:80]!r} is missing")
        if (tensor.dtype, tensor.shape) != (SAFETENSORS[spec.dtype], spec.sizes):
            what = f"the constant {name[:80]!r} is {tensor.dtype} {tensor.shape}"
            raise ProtocolError(f"{what}, not {spec.dtype} {spec.sizes}")
        constants[name] = tensor
    return constants


class Content(Protocol):
    """A tensor to be written."""

    @property
    def dtype(self) -> str:
        """Its dtype, as safetensors names it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def data(self) -> Any:
        """A buffer with its elements, in row-major order."""


def write_tensors(into: Writable, tensors: Mapping[str, Content], metadata: Mapping[str, str]) -> None:
    """Write a file tensor by tensor, in the order of safetensors: by dtype, then by name. Raises OSError."""
    order = sorted(tensors, key=lambda name: (-_RANK[tensors[name].dtype], name))
    header = header_of([(name, tensors[name].dtype, tensors[name].shape) for name in order], metadata)
    into.write(0, header)
    at = len(header)
    for name in order:
        data = memoryview(tensors[name].data())
        into.write(at, data)
        at += data.nbytes


def header_of(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file with these tensors (name, dtype, shape) in this order.

    Byte for byte that of safetensors if they are in its order, and if there is one text at most.
    """
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + _ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _entry(name: str, entry: Any, what: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """(dtype, shape, offsets) of one entry of a header."""
    if isinstance(entry, dict) and entry.get("dtype") in SAFETENSORS.values():
        shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
        if shape is not None and offsets is not None and len(offsets) == 2:
            return entry["dtype"], shape, (offsets[0], offsets[1])
    raise ProtocolError(f"{name[:80]!r} is no tensor in {what}")


def _counts(numbers: object) -> tuple[int, ...] | None:
    """A list of numbers from 0 on; None for anything else."""
    if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        return None
    return tuple(numbers)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON map in which no name comes twice. Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _refused(number: str) -> None:
    raise ValueError(f"{number} is no JSON")
