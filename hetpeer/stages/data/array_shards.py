"""Shards from the author's samples: mappings of arrays that all have the same names, dtypes and shapes.

There may be more samples than memory: they go to a file as they come, are shuffled once, so that the held-out
tail is like the rest whatever their order, and are gathered into shards from there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.microbatches import SPLIT_STREAM, Indices, permutation
from hetpeer.stages.data.sample_spool import SampleSpool
from hetpeer.stages.data.shards import (
    DTYPES,
    SHARD_BYTES,
    Array,
    Arrays,
    ArraySpec,
    ShardFile,
    even_parts,
    too_little,
    write_shard,
)

NAME = r"^[A-Za-z][A-Za-z0-9_]{0,63}$"
MAX_DIMENSIONS = 15
"""Dimensions of one sample's array; with that of the samples it is what a graph may have."""
Look = Callable[[Arrays], None]
"""Gets samples: name → array [samples, …]."""
Sample = dict[str, ArraySpec]
"""Name → array of one sample."""
Records = np.ndarray[Any, np.dtype[Any]]
"""Samples, [samples], of a structured dtype with a field for each array."""


def write_samples(
    samples: Iterable[Any],
    folder: Path,
    heldout_fraction: float,
    seed: int,
    maker: str = "the data function yields",
    looks: Sequence[Look] = (),
) -> tuple[Sample, list[ShardFile], list[ShardFile]]:
    """(arrays of a sample, training shards, held-out shards), after checking and shuffling the samples.

    `heldout_fraction` 0 holds none out, 1 all; otherwise there is at least one of each. `maker` begins the
    message about too few; `looks` get all samples, shard by shard. Raises `LocalError` HP-DATA-005 for the
    first sample that differs from the first one or cannot be trained on, HP-DATA-003 if there are too few,
    and OSError if `folder` cannot be written. Errors of `samples` pass through.
    """
    path = folder / "samples.spool"
    some = [share for share in (heldout_fraction, 1 - heldout_fraction) if share]
    specs, records = _spool(samples, path)
    count = len(records)
    if count < len(some):
        raise _too_few(maker, count, len(some))
    order = permutation(seed, SPLIT_STREAM, count)
    trained = count - max(1, int(count * heldout_fraction)) if heldout_fraction else count
    train_shards = _write(records, order[:trained], folder, specs, looks)
    heldout_shards = _write(records, order[trained:], folder, specs, looks)
    del records
    path.unlink(missing_ok=True)
    return specs, train_shards, heldout_shards


def example_of(samples: Sequence[Any], count: int, maker: str) -> Arrays:
    """Name → array [count, …] of the first `samples`, repeated if there are fewer.

    Raises `LocalError` HP-DATA-003 without any, HP-DATA-005 for one that cannot be used.
    """
    if not samples:
        raise _too_few(maker, 0, 2)
    found = [_arrays(sample, number) for number, sample in enumerate(samples)]
    specs = _specs(found[0])
    for number, arrays in enumerate(found):
        _check_alike(specs, arrays, number)
    rows = [found[number % len(found)] for number in range(count)]
    return {name: np.stack([row[name] for row in rows]) for name in specs}


def _spool(samples: Iterable[Any], path: Path) -> tuple[Sample, Records]:
    """(arrays of a sample, all samples in their own order)."""
    specs: Sample = {}
    spool = None
    for number, sample in enumerate(samples):
        arrays = _arrays(sample, number)
        if spool is None:
            specs = _specs(arrays)
            spool = SampleSpool(path, specs)
        _check_alike(specs, arrays, number)
        spool.add(arrays)
    return specs, np.empty(0) if spool is None else spool.finish()


def _specs(arrays: Arrays) -> Sample:
    return {name: ArraySpec(dtype=_name(array.dtype), shape=array.shape) for name, array in arrays.items()}


def _check_alike(specs: Sample, arrays: Arrays, number: int) -> None:
    """Raises `LocalError` HP-DATA-005 if sample `number` has other arrays than the first one."""
    found = _specs(arrays)
    if found != specs:
        raise _bad(number, _difference(specs, found), "give all samples the same arrays")


def _too_few(maker: str, count: int, needed: int) -> LocalError:
    return too_little(
        f"{maker} {count} samples, at least {needed} are needed",
        fix="give more data; of a chat the assistant's words count, of a text all but its first token; a "
        "data function yields one mapping of names to numpy arrays for each sample",
    )


def _arrays(sample: Any, number: int) -> Arrays:
    """The sample's arrays, sorted by name, in native byte order, each checked by itself."""
    if not isinstance(sample, Mapping) or not sample:
        raise _bad(number, f"it is a {type(sample).__name__}", "yield mappings of names to numpy arrays")
    for name in sample:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise _bad(number, f"{name!r} is no name", "call arrays by letters, digits and underscores")
    return {name: _array(sample[name], name, number) for name in sorted(sample)}


def _array(value: Any, name: str, number: int) -> Array:
    """`value` of sample `number` as an array, in native byte order. Raises an error if it is unfit."""
    try:
        array = np.asarray(value)
    except Exception as error:
        raise _bad(number, f"{name!r} is no array: {error}", "yield numpy arrays") from error
    if _name(array.dtype) not in DTYPES:
        raise _bad(number, f"{name!r} is of dtype {array.dtype.name}", f"use one of {', '.join(DTYPES)}")
    if array.size == 0 or array.ndim > MAX_DIMENSIONS:
        raise _bad(
            number,
            f"{name!r} has the shape {array.shape}",
            f"use 1 to {MAX_DIMENSIONS} dimensions, none empty",
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _bad(number, f"{name!r} holds NaN or infinity", "leave such samples out, or clean them")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@lru_cache
def _name(dtype: np.dtype[Any]) -> str:
    """Numpy's name of a dtype, which it makes anew each time."""
    return dtype.name


def _difference(specs: Sample, found: Sample) -> str:
    if specs.keys() != found.keys():
        return f"it has {', '.join(found)}, and the first one has {', '.join(specs)}"
    name = next(name for name in specs if specs[name] != found[name])
    ours, first = found[name], specs[name]
    return (
        f"{name!r} is {ours.dtype} {list(ours.shape)}, and in the first one {first.dtype} {list(first.shape)}"
    )


def _write(
    records: Records,
    order: Indices,
    folder: Path,
    specs: Sample,
    looks: Sequence[Look],
) -> list[ShardFile]:
    """Write the samples `order` in shards of about equal size."""
    shards, begin = [], 0
    size = sum(np.dtype(spec.dtype).itemsize * math.prod(spec.shape) for spec in specs.values())
    for count in even_parts(len(order), max(1, SHARD_BYTES // size)):
        rows = records[order[begin : begin + count]]
        arrays = {name: np.ascontiguousarray(rows[name], dtype=spec.dtype) for name, spec in specs.items()}
        for look in looks:
            look(arrays)
        shards.append(write_shard(folder, arrays, count))
        begin += count
    return shards


def _bad(number: int, why: str, fix: str) -> LocalError:
    return LocalError(
        "HP-DATA-005",
        f"sample {number} of the data function cannot be used",
        why=why,
        fix=fix,
        exit_code=ExitCode.CONFIG,
    )
