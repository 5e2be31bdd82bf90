"""Rows of a long benchmark on disk, each as soon as it is measured: one that is cut goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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
