"""Samples on the disk until their order is drawn: one record each, integers in as few bytes as they need.

Token ids are int64 for the model, and below 65,536 in most vocabularies: a quarter of the bytes is written
and read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hetpeer.stages.data.shards import Array, Arrays, ArraySpec

BLOCK_BYTES = 2**22
"""Bytes of samples in memory until they are written, if one sample is not larger."""
FEWEST = tuple(map(np.dtype, ("uint8", "int8", "uint16", "int16", "uint32", "int32")))
"""Dtypes that integers are tried in, narrowest first."""


class SampleSpool:
    """A file of samples with the arrays `specs`.

    spool = SampleSpool(folder / "samples.spool", specs)
    spool.add(arrays)
    records = spool.finish()  # structured array [samples], mapped from the file
    """

    def __init__(self, path: Path, specs: Mapping[str, ArraySpec]) -> None:
        """Create the file. Raises OSError."""
        self._path = path
        self._file = path.open("wb")
        wide = np.dtype([(name, spec.dtype, spec.shape) for name, spec in specs.items()])
        self._block = np.empty(max(1, BLOCK_BYTES // wide.itemsize), dtype=wide)
        self._ranges: dict[str, tuple[int, int]] = {}
        self._dtype: np.dtype[Any] | None = None
        """Dtype of the records in the file; None: nothing is written."""
        self._pending = 0
        self._written = 0

    def add(self, arrays: Arrays) -> None:
        """Append a copy of one sample. Raises OSError."""
        row = self._block[self._pending]
        for name, array in arrays.items():
            row[name] = array
        self._pending += 1
        if self._pending == len(self._block):
            self._flush()

    def finish(self) -> np.ndarray[Any, np.dtype[Any]]:
        """All samples; there is at least one. Raises OSError."""
        self._flush()
        self._file.close()
        assert self._dtype is not None
        return np.memmap(self._path, dtype=self._dtype, mode="r")

    def _flush(self) -> None:
        """Write what is pending, after giving all earlier records the bytes that it needs."""
        if not self._pending:
            return
        rows = self._block[: self._pending]
        wide = rows.dtype
        dtype = np.dtype(
            [(name, self._fewest(name, rows[name]), wide[name].shape) for name in wide.names or ()]
        )
        if self._dtype is not None and dtype != self._dtype:
            self._write_again(self._dtype, dtype)
        self._dtype = dtype
        self._file.write(rows.astype(dtype).tobytes())
        self._written += self._pending
        self._pending = 0

    def _fewest(self, name: str, array: Array) -> np.dtype[Any]:
        """Narrowest dtype for all numbers of an array so far."""
        if array.dtype.kind not in "iu":
            return array.dtype
        low, high = int(array.min()), int(array.max())
        before = self._ranges.get(name, (low, high))
        low, high = self._ranges[name] = min(low, before[0]), max(high, before[1])
        for dtype in FEWEST:
            limits = np.iinfo(dtype)
            if dtype.itemsize < array.dtype.itemsize and limits.min <= low and high <= limits.max:
                return dtype
        return array.dtype

    def _write_again(self, before: np.dtype[Any], dtype: np.dtype[Any]) -> None:
        """Replace the file, written with `before`, by one with `dtype`; at most a few times in its life."""
        self._file.close()
        earlier = self._path.rename(self._path.with_suffix(".earlier"))
        self._file = self._path.open("wb")
        for rows in _blocks(np.memmap(earlier, dtype=before, mode="r"), len(self._block)):
            self._file.write(rows.astype(dtype).tobytes())
        earlier.unlink()


def _blocks(records: np.ndarray[Any, np.dtype[Any]], size: int) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    for begin in range(0, len(records), size):
        yield records[begin : begin + size]
