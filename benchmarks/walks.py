"""How far a reader walks to follow one thing through the code: files, calls, switches from file to file.

Two volunteers train a small model in real daemons, which write down every call of ours
(benchmarks/walker.py):

    forward   a payload has arrived → its forward is posted to the worker
    backward  a backward is answered → its gradient is on its way and the next work posted
    ready     the `Ready` that makes a run whole, from the stream → the first `Begin`
    join      `hetpeer join` → the first microbatch is done (files alone)

Of each walk the one with the fewest switches is shown, beside the same of the commit before the rooms were
made: in longer ones the loop did something else in between. Of `join`, the volunteer that went through most
files. A switch is a call in another file than the call before; it goes back if that file was seen earlier in
the walk.

    python -m benchmarks.walks
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.swarm import WITHOUT_END, Model, Site, Swarm, make_run, running
from benchmarks.walker import BACKWARD, FORWARD, JOIN, READY

STEPS = 6
START_S = 300.0
COMMAND = (sys.executable, "-P", "-m", "benchmarks.walker")
BEFORE: dict[str, dict[str, int]] = {
    FORWARD: {"files": 35, "calls": 167, "switches": 97, "back": 63},
    BACKWARD: {"files": 52, "calls": 265, "switches": 163, "back": 112},
    READY: {"files": 53, "calls": 278, "switches": 174, "back": 122},
    JOIN: {"files": 202},
}
"""Figures of this script at e32fc21."""
GOALS = {
    FORWARD: {"files": 18, "switches": 35},
    BACKWARD: {"files": 25, "switches": 70},
    READY: {"files": 25, "switches": 90},
    JOIN: {"files": 110},
}


def counted(calls: Sequence[str]) -> dict[str, int]:
    """Figures of one walk, from the file of each call."""
    files = len(set(calls))
    switches = sum(one != other for one, other in pairwise(calls))
    return {"files": files, "calls": len(calls), "switches": switches, "back": switches - files + 1}


def undisturbed(walks: Sequence[Sequence[str]]) -> Sequence[str]:
    """The walk with the fewest switches."""
    return min(walks, key=lambda calls: counted(calls)["switches"])


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    run = make_run(folder, Model(width=64, layers=2), 2, WITHOUT_END, options.seed)
    async with running(run, folder, 2, site=Site(command=COMMAND)) as swarm:
        await swarm.until(STEPS, START_S)
        walks = found(swarm, folder)
    shown = {name: max(walks[name], key=len) if name == JOIN else undisturbed(walks[name]) for name in GOALS}
    figures = {name: counted(shown[name]) for name in GOALS}
    figures[JOIN] = {"files": figures[JOIN]["files"]}
    met = {
        name: all(figures[name][what] <= most for what, most in goal.items()) for name, goal in GOALS.items()
    }
    return {
        "walks": {name: figures[name] | {"of": len(walks[name])} for name in GOALS},
        "before": BEFORE,
        "goals": GOALS,
        "path": {name: list(dict.fromkeys(shown[name])) for name in GOALS},
        "met": all(met.values()),
    }


def found(swarm: Swarm, folder: Path) -> dict[str, list[list[str]]]:
    """Name → the walks that the daemons wrote down."""
    walks: dict[str, list[list[str]]] = defaultdict(list)
    for path in folder.glob("*/walks.jsonl"):
        for line in path.read_text().splitlines():
            walk = json.loads(line)
            walks[walk["walk"]].append(walk["calls"])
    swarm.check()
    return walks


def show(figures: dict[str, Any]) -> None:
    print(f"{'walk':9} {'files':>13} {'calls':>13} {'switches':>13} {'go back':>13}   goal   (e32fc21 → now)")
    for name, now in figures["walks"].items():
        before = figures["before"].get(name, {})
        cells = [
            f"{before.get(what, '?')!s} → {now[what]}" if what in now else ""
            for what in ("files", "calls", "switches", "back")
        ]
        goal = " / ".join(f"≤ {most} {what}" for what, most in GOALS[name].items())
        met = all(now[what] <= most for what, most in GOALS[name].items())
        print(
            f"{name:9} " + " ".join(f"{cell:>13}" for cell in cells),
            f"  {goal}: {'met' if met else 'MISSED'}",
        )


def main() -> int:
    options = report.parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("walks", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
