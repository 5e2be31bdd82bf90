"""Rows of a long benchmark on disk, each as soon as it is measured: one that is cut goes on where it was."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import report

Row = dict[str, Any]
Asked = tuple[dict[str, Any], Callable[..., Row], Sequence[Any]]
"""All that a row depends on, and the call that measures it."""


class KeptRows:
    """A folder with a file for each row, named by what was asked; without a folder nothing is kept.

    >>> KeptRows(None).get({"seed": 0}) is None
    True
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def _path(self, asked: Mapping[str, Any]) -> Path | None:
        text = json.dumps(asked, sort_keys=True).encode()
        return self.folder and self.folder / f"{hashlib.sha256(text).hexdigest()[:20]}.json"

    def get(self, asked: Mapping[str, Any]) -> Row | None:
        """The row that was kept for `asked`, or None."""
        path = self._path(asked)
        if path is None or not path.exists():
            return None
        row: Row = json.loads(path.read_text())
        return row

    def put(self, asked: Mapping[str, Any], row: Row) -> None:
        """Keep `row`, whole or not at all."""
        path = self._path(asked)
        if path is not None:
            part = path.with_suffix(".part")
            part.write_text(json.dumps(row))
            part.replace(path)


def commits(rows: Iterable[Row]) -> list[str]:
    """Commits by which the rows were measured."""
    return sorted({row["commit"] for row in rows})


def add_keeping(parser: argparse.ArgumentParser) -> None:
    """Add the options that `measured_rows` reads."""
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a thread each (default: 1)")
    parser.add_argument("--keep", type=Path, help="folder with each finished run: one that is cut goes on")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="minutes after which no run begins (default: none)"
    )


def measured_rows(options: argparse.Namespace, asked: Sequence[Asked]) -> list[Row]:
    """A row for each of `asked`, from the folder or measured now; those not begun in time are left out."""
    kept = KeptRows(options.keep)
    rows = [kept.get(what) for what, _, _ in asked]
    deadline = time.time() + 60 * options.within
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        runs: dict[Future[Row | None], int] = {
            pool.submit(_unless_late, deadline, work, arguments): place
            for place, (_, work, arguments) in enumerate(asked)
            if rows[place] is None
        }
        for run in as_completed(runs):
            row = run.result()
            if row is not None:
                rows[runs[run]] = row = row | {"commit": report.commit()}
                kept.put(asked[runs[run]][0], row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    return [row for row in rows if row is not None]


def _unless_late(deadline: float, work: Callable[..., Row], arguments: Sequence[Any]) -> Row | None:
    """A row, or None after `deadline` (seconds since the epoch): what has begun ends."""
    return None if time.time() >= deadline else work(*arguments)
