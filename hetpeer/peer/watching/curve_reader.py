"""Reads `metrics.jsonl` while it grows: new points, and what a roll-back has made void (docs/watching.md).

The file grows at its end, or is replaced by another one (bootstrap/storage/metrics_file.py). Of a long curve
sixteen bytes for each point are kept, and a few hundred points at a time are in memory.
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ROW = 256
"""Most points of one change."""


@dataclass(frozen=True, slots=True)
class PlacedPoint:
    """A point of the curve, and its place: the number of updates (grouped runs: of commits) behind it."""

    x: int
    fields: Mapping[str, Any]

    @property
    def is_step(self) -> bool:
        """Whether it is a training step; an evaluation or a score otherwise."""
        return bool(self.fields["kind"] == "step")

    @property
    def scalars(self) -> dict[str, float]:
        """Tag → number, with the tags that Hugging Face's Trainer uses."""
        kind, fields = ("train" if self.is_step else "eval"), self.fields
        if "scores" in fields:
            return {f"eval/{name}": float(score) for name, score in fields["scores"].items()}
        names = {"norm": "grad_norm"}
        found = {
            f"{kind}/{names.get(name, name)}": float(fields[name])
            for name in ("loss", "perplexity", "accuracy", "learning_rate", "norm", *SPEEDS)
            if fields.get(name) is not None
        }
        norms = enumerate(fields.get("block_norms", ()))
        found |= {f"grad_norm/block_{block:03}": float(norm) for block, norm in norms}
        groups = fields.get("group_norms", {}).items()
        return found | {f"grad_norm/{name}": float(norm) for name, norm in groups}


SPEEDS = ("tokens_per_second", "samples_per_second")


@dataclass(frozen=True, slots=True)
class CurveChange:
    """Points in the file's order. Earlier points with an x of `void_from` or more are void; None: none."""

    points: list[PlacedPoint]
    void_from: int | None = None


class CurveReader:
    """Follows the file `path`, which need not exist yet. `grouped`: x is the number of commits.

    for change in reader.look():
        ...
    """

    def __init__(self, path: Path, *, grouped: bool = False) -> None:
        self._path = path
        self._grouped = grouped
        self._file: BinaryIO | None = None
        """The file that is followed; open, so that no other one gets its inode."""
        self._commits = 0
        self._places, self._hashes = array("q"), array("q")
        """x and hash of each line that was read."""

    def look(self) -> Iterator[CurveChange]:
        """Changes since the last look, in order; none if there are none. Raises OSError."""
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return
        if self._file is not None:
            known = os.fstat(self._file.fileno())
            if (known.st_dev, known.st_ino) == (now.st_dev, now.st_ino) and now.st_size >= self._file.tell():
                yield from _rows(self._points(self._file))
                return
        yield from self._anew()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _anew(self) -> Iterator[CurveChange]:
        """Read another file: of the old points those stay that come before the first difference."""
        self.close()
        self._file = self._path.open("rb")
        before = sorted(zip(self._places, self._hashes, strict=True))
        self._commits, self._places, self._hashes = 0, array("q"), array("q")
        for _ in self._points(self._file):
            pass
        after = sorted(zip(self._places, self._hashes, strict=True))
        pairs = itertools.zip_longest(before, after)
        differs = next((place for place, (old, new) in enumerate(pairs) if old != new), None)
        if differs is None:
            return
        begin = min(x for x, _ in (*before[differs : differs + 1], *after[differs : differs + 1]))
        self._file.seek(0)
        self._commits, self._places, self._hashes = 0, array("q"), array("q")
        wanted = (point for point in self._points(self._file) if point.x >= begin)
        void_from = begin if before and before[-1][0] >= begin else None
        yield CurveChange(list(itertools.islice(wanted, ROW)), void_from)
        yield from _rows(wanted)

    def _points(self, file: BinaryIO) -> Iterator[PlacedPoint]:
        """Points of the whole lines from the file's position on, and notes them."""
        while True:
            begin = file.tell()
            line = file.readline()
            if not line.endswith(b"\n"):  # a part of a line: the rest comes, or another file
                file.seek(begin)
                return
            try:
                fields = json.loads(line)
                self._commits += fields["kind"] == "step"
                x = self._commits if self._grouped else int(fields["step"]) + (fields["kind"] == "step")
            except (ValueError, TypeError, KeyError):
                continue  # somebody has edited the file
            self._places.append(x)
            self._hashes.append(hash(line))
            yield PlacedPoint(x, fields)


def _rows(points: Iterator[PlacedPoint]) -> Iterator[CurveChange]:
    """Changes of at most ROW points."""
    while row := list(itertools.islice(points, ROW)):
        yield CurveChange(row)
