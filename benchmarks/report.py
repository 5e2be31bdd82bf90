"""A benchmark's result as a file that can be compared later: the figures, and what they were measured on.

Every benchmark takes `--json` (one object on stdout) and writes benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.wanlab.quiet import stolen

FOLDER = Path(__file__).with_name("results")
_BEGAN = psutil.cpu_times()


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    made.add_argument("--seed", type=int, default=0)
    return made


def keep(name: str, figures: dict[str, Any], *, seed: int) -> dict[str, Any]:
    """Write `figures` with date, commit, seed and machine to benchmarks/results/`name`.json; returns the
    document.
    """
    document = {
        "benchmark": name,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "seed": seed,
        "machine": machine() | {"stolen": round(stolen(_BEGAN, psutil.cpu_times()), 4)},
        **figures,
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    return document


def show_goals(goals: Mapping[str, bool]) -> None:
    """Each on a line: met, or missed."""
    for goal, met in goals.items():
        print(f"{goal}: {'met' if met else 'MISSED'}")


def finish(
    name: str, figures: dict[str, Any], options: argparse.Namespace, show: Callable[[dict[str, Any]], None]
) -> int:
    """Keep `figures`, tell them in words or as `--json`, and return the exit status: 1 if a goal is
    missed, by `met`.
    """
    document = keep(name, figures, seed=options.seed)
    if options.json:
        print(json.dumps(document))
    else:
        show(figures)
    return 0 if figures.get("met", True) else 1


def without_gpu(device: str) -> bool:
    """Whether `device` is a GPU that this machine lacks; says so then."""
    import torch

    missing = device.startswith("cuda") and not torch.cuda.is_available()
    if missing:
        print(f"skipped: torch {torch.__version__} sees no CUDA device on this machine")
    return missing


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that is checked out; `+` where files other than results differ from it, empty outside a
    checkout.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FOLDER.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", f":(exclude){FOLDER}")
    return head + ("+" if changed else "")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
