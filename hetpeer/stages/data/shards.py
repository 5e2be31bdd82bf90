"""Data shards: safetensors files named by their content and checked against the manifest's hash.

A shard of arrays has one tensor for each name of the samples, [samples, …]. A shard of text has one, `tokens`
uint8, from which windows are cut when it is read. Files are mapped, not loaded; only a microbatch's part is
copied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from safetensors.numpy import save

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.graph.block_spec import ITEM_BYTES, SAFETENSORS

SHARD_BYTES = 8 * 2**20 - 2**16
"""Bytes of samples in a shard: with its header below 8 MiB. A larger sample has a shard of its own."""
DTYPES = tuple(name for name in ITEM_BYTES if name != "bfloat16")
"""Dtypes of samples: those of a graph that numpy has."""
TOKENS, TARGETS = "tokens", "targets"
"""The arrays of a text sample; TOKENS is also the tensor in a text shard, with all of its bytes."""
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
CODES = {code: name for name, code in SAFETENSORS.items()}
"""Safetensors' names of dtypes → numpy's, which lacks bfloat16."""

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array of a sample: a dtype of `DTYPES`, and the shape without the dimension of the samples."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A shard file: its name in its folder, content hash (64 hex digits), file size and number of samples."""

    name: str
    blake3: str
    bytes: int
    samples: int


def even_parts(total: int, largest: int) -> list[int]:
    """`total` in as few parts of at most `largest` as possible, which differ by at most one."""
    count = -(-total // largest)
    return [total // count + (number < total % count) for number in range(count)]


def write_shard(folder: Path, tensors: Mapping[str, Array], samples: int) -> ShardFile:
    """Write one shard durably. Raises OSError."""
    data: bytes = save(dict(tensors))
    digest = blake3(data).hexdigest()
    shard = ShardFile(name=f"{digest[:32]}.safetensors", blake3=digest, bytes=len(data), samples=samples)
    write_durably(folder / shard.name, data)
    return shard


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def map_shard(path: Path, shard: ShardFile) -> Arrays:
    """The tensors of a shard file, mapped read-only. Nothing in it is parsed before its hash is checked.

    Raises `LocalError` HP-DATA-002 if it is missing, cut short, damaged, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            raise damaged(path, f"it has {size} bytes, the manifest says {shard.bytes}")
        if blake3().update_mmap(path).hexdigest() != shard.blake3:
            raise damaged(path, "its content does not have the hash the manifest says")
        return dict(_tensors(np.memmap(path, dtype=np.uint8, mode="r")))
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, "it is not a safetensors file of numpy's dtypes") from error


def _tensors(content: np.memmap[Any, Any]) -> Iterator[tuple[str, Array]]:
    """(name, array) of a file. Raises many kinds of errors, since a header may say anything."""
    begin = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES].tobytes(), "little")
    header = json.loads(content[LENGTH_BYTES:begin].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        place = content[begin + first : begin + last]
        yield name, place.view(np.dtype(CODES[entry["dtype"]])).reshape(entry["shape"])


def damaged(path: Path, why: str) -> LocalError:
    """HP-DATA-002."""
    return LocalError(
        "HP-DATA-002",
        f"data shard {path} is damaged",
        why=why,
        fix="fetch it again, or make the run again from the same data",
        exit_code=ExitCode.VERSION,
    )


def too_little(what: str, fix: str) -> LocalError:
    """HP-DATA-003: `what` says how much there is and how much is needed."""
    why = "every shard has whole samples, and some are held out to evaluate with"
    return LocalError("HP-DATA-003", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)
