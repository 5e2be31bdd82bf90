"""Cost of a replay: `hetpeer audit --replay` of the demo's run against training by one machine.

Two commands take turns on the same run: `hetpeer audit --replay`, and a process with the author's module and
plain torch (benchmarks/alone.py) on the volunteers' number of threads. Processor seconds are those of a
command and its children; wall seconds say what a person waits. Both include the start of Python and torch.

    python -m benchmarks.replaycost
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

GOAL = 1.5
HETPEER = (sys.executable, "-P", "-m", "hetpeer.peer.cli.main")


def spent(command: Sequence[str]) -> dict[str, float]:
    """Processor and wall seconds of `command`, which must succeed."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    path = os.pathsep.join(folder for folder in sys.path if folder)
    environment = os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor_s": processor, "wall_s": time.monotonic() - began}


def measure(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, Any]:
    """Medians of each command, and of the ratios of the rounds; they start in turn."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds):
        for name in list(commands)[:: 1 if number % 2 else -1]:
            turns[name].append(spent(commands[name]))
    found: dict[str, Any] = {}
    for what in ("processor_s", "wall_s"):
        seconds = {name: [turn[what] for turn in taken] for name, taken in turns.items()}
        ratios = [ours / theirs for ours, theirs in zip(seconds["replay"], seconds["alone"], strict=True)]
        found[what] = {name: round(statistics.median(taken), 2) for name, taken in seconds.items()}
        found[what]["ratio"] = round(statistics.median(ratios), 3)
    return found


def show(figures: Mapping[str, Any]) -> None:
    for what, unit in (("processor_s", "processor seconds"), ("wall_s", "seconds")):
        one = figures[what]
        print(f"replay {one['replay']} {unit}, training {one['alone']}: ratio {one['ratio']}")
    print(f"goal: {GOAL} and less in processor seconds: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--steps", type=int, default=60, help="steps of the demo's run (default: 60)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        demo = Path(folder) / "demo"
        subprocess.run(
            (*HETPEER, "demo", "--peers=4", f"--steps={options.steps}", "--kill=1", f"--out={demo}"),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        run = str(demo / "run")
        commands = {
            "alone": (sys.executable, "-P", "-m", "benchmarks.alone", run, "--threads=1"),
            "replay": (*HETPEER, "audit", "--replay", run),
        }
        figures = {"goal": GOAL, "rounds": options.rounds, "steps": options.steps}
        figures |= measure(commands, options.rounds)
    figures["met"] = figures["processor_s"]["ratio"] <= GOAL
    return report.finish("replaycost", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
