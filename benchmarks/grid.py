"""The fault grid: a process dies at every place of the protocol, one after the other, in swarms of real
processes.

Each cell is a test of tests/swarm (docs/faults.md has the table): the run must be complete, exactly once by
the volunteers' signed logs, and with the losses of one machine. Kept is how each ended and how long it took;
a cell that was skipped is missed.

    make grid
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
from typing import Any

import pytest

from benchmarks import report


class Outcomes:
    """A pytest plugin: what became of each test, as told to the process that was started."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, _, name = report.nodeid.rpartition("/")
        cell = self.cells.setdefault(name, {"outcome": "passed", "seconds": 0.0})
        cell["seconds"] = round(cell["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            cell["outcome"] = report.outcome


def measure(options: Any) -> dict[str, Any]:
    outcomes = Outcomes()
    arguments = ["-q", "-m", "grid", "-n", str(options.jobs), *options.tests]
    talk = contextlib.redirect_stdout(io.StringIO()) if options.json else contextlib.nullcontext()
    with talk:
        status = pytest.main(arguments, plugins=[outcomes])
    cells = dict(sorted(outcomes.cells.items()))
    missed = [name for name, cell in cells.items() if cell["outcome"] != "passed"]
    return {
        "cells": cells,
        "passed": len(cells) - len(missed),
        "missed": missed,
        "median_s": statistics.median([cell["seconds"] for cell in cells.values()] or [0.0]),
        "met": status == pytest.ExitCode.OK and bool(cells) and not missed,
    }


def show(figures: dict[str, Any]) -> None:
    cells = figures["cells"]
    print(f"{figures['passed']} of {len(cells)} cells passed, {figures['median_s']:.1f} s each in the middle")
    for name in figures["missed"]:
        print(f"  {cells[name]['outcome']}: {name}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument(
        "tests", nargs="*", default=["tests/swarm"], help="some of them (default: tests/swarm)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="swarms at a time (default: 2)")
    options = parser.parse_args()
    return report.finish("grid", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
