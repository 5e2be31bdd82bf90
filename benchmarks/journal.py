"""Finished parts of a long benchmark, a line each: interrupted, the same command goes on where
it was, also at another commit, as long as no module that it loads differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from blake3 import blake3

from benchmarks import report


def sources(*packages: str) -> str:
    """Hash of all modules of hetpeer, and of `packages`, that are loaded."""
    roots = ("hetpeer", *packages)
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if any(name == root or name.startswith(f"{root}.") for root in roots)
    ]
    files = [Path(module.__file__) for module in modules if module.__file__]
    return blake3(b"".join(file.read_bytes() for file in files)).hexdigest()


class Journal:
    """The file at `path`: the parts that are done of what is exactly `about` this.

    One that was cut short is as if it had never been written.
    """

    def __init__(self, path: Path, **about: Any) -> None:
        self._path = path
        self._about = about
        self.done: dict[str, dict[str, Any]] = {}
        """Part → its figures."""
        self.commits: set[str] = {report.commit()}
        whole, _, cut = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
        for line in whole.splitlines():
            entry = json.loads(line)
            if entry["about"] != about:
                raise SystemExit(
                    f"{path} is of other sources, or of something else: remove it, or name another"
                )
            self.commits.add(entry["commit"])
            self.done[entry["part"]] = entry["figures"]
        if cut:
            path.write_text(f"{whole}\n" if whole else "")

    def add(self, part: str, figures: dict[str, Any]) -> None:
        """One more part is done."""
        self.done[part] = figures
        entry = {"about": self._about, "commit": report.commit(), "part": part, "figures": figures}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
