"""Architectures of transformers and timm as runs: small random configurations against their eager training.

Each is traced, cut and compared on one microbatch as `init` does it, in a process of its own with bounded
time and memory. Writes benchmarks/results/zoo.json and docs/models.md. A library that cannot be imported here
is left out with a line, and its models keep their last results.

    python -m benchmarks.zoo [NAME …] [--family FAMILY|transformers|timm]
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.zoo_page import LIBRARIES, PAGE, Entry, entries, kept_rows, library_of, page
from hetpeer.dht.base.errors import LocalError

TIME_S = 240
"""Seconds of a processor for one architecture; it may wait four times as long for them."""
MEMORY = 8 << 30
"""Bytes of one architecture's process."""
LAST = 3
"""Samples of a smaller last microbatch, for which the blocks' shapes are checked."""
PACKAGES = {"transformers": ("transformers", "torch"), "timm": ("timm", "torchvision", "torch")}
"""Library → packages whose versions its results depend on."""


# ── One architecture ───────────────────────────────────────────────────────────────────────────────────────


def attempt(entry: Entry) -> dict[str, Any]:
    """Result of an architecture: whether it works, else why not; differences from eager training."""
    from hetpeer.bootstrap.model_checks.equivalence import check_likeness
    from hetpeer.stages.tracing.cut import cut_blocks
    from hetpeer.stages.tracing.stand_ins.checkpoints import plain_checkpoints
    from hetpeer.stages.tracing.trace import trace

    maker = importlib.import_module(
        {"transformers": "benchmarks.zoo_models", "timm": "benchmarks.zoo_timm"}[library_of(entry.family)]
    )
    try:
        model, example = maker.make(entry.name, entry.task)
        model.train()
        model(**example).backward()
        model.zero_grad(set_to_none=True)
    except Exception as error:  # noqa: BLE001 - the zoo's own configuration may be wrong in any way
        why = f"its configuration in the zoo does not train: {type(error).__name__}: {error}"
        return {"works": False, "why": why[:300]}
    began = time.process_time()
    try:
        with plain_checkpoints():
            dag = trace(model, example)
            specs = cut_blocks(dag)
            loss, gradient = check_likeness(model, example, dag, specs).worst()
        if dag.dynamic:
            _check_smaller(specs)
    except LocalError as error:
        return {"works": False, "code": error.code, "why": f"{error.what}: {error.why}"}
    return {
        "works": True,
        "loss": loss,
        "gradient": gradient,
        "dynamic": dag.dynamic,
        "blocks": len(specs),
        "operators": len(dag.nodes),
        "seconds": round(time.process_time() - began, 1),
    }


def _check_smaller(specs: Any) -> None:
    """Check the blocks' shapes for a smaller last microbatch. Raises ProtocolError."""
    from hetpeer.stages.graph.safety_check import check_at
    from hetpeer.stages.graph.structure_check import DEFAULT_LIMITS

    for spec in specs:
        check_at(spec, LAST, DEFAULT_LIMITS)


def _child(entry: Entry, answers: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_S, TIME_S))
    with (
        Path("/dev/null").open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        try:
            answer = attempt(entry)
        except Exception as error:  # noqa: BLE001 - a fault of ours is a finding
            answer = {"works": False, "why": f"{type(error).__name__}: {error}"[:300]}
    answers.send(answer)


def bounded(entry: Entry) -> dict[str, Any]:
    """`attempt` in a process of its own, which is ended after `TIME_S` seconds of a processor."""
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=_child, args=(entry, theirs))
    process.start()
    theirs.close()
    try:
        if not mine.poll(4 * TIME_S):
            return {"works": False, "why": f"not done within {4 * TIME_S} s"}
        return mine.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return {"works": False, "why": f"not done within {TIME_S} s of a processor"}
        return {"works": False, "why": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


# ── All of them ────────────────────────────────────────────────────────────────────────────────────────────


def usable(asked: list[Entry]) -> Iterator[str]:
    """Libraries among those `asked` that can be imported; says so of another."""
    for library in LIBRARIES:
        if any(library_of(entry.family) == library for entry in asked):
            try:
                importlib.import_module(library)
            except Exception as error:  # noqa: BLE001 - a package that fits no torch raises anything
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                print(
                    f"{library} cannot be imported ({why}): its models keep their last results; install "
                    f"{' and '.join(PACKAGES[library])} that fit each other (pip install -e '.[zoo]')",
                    file=sys.stderr,
                )
            else:
                yield library


def main() -> int:
    options = report.parser(__doc__ or "")
    options.add_argument(
        "names", nargs="*", metavar="NAME", help="these alone; the others keep their results"
    )
    families = [family for library in LIBRARIES.values() for family in library]
    options.add_argument(
        "--family", choices=[*LIBRARIES, *families], help="a family, or all of a library: these alone"
    )
    options.add_argument("--jobs", type=int, default=2)
    asked = options.parse_args()
    chosen = list(entries(asked.family, asked.names))
    libraries = {
        library: ", ".join(f"{package} {version(package)}" for package in PACKAGES[library])
        for library in usable(chosen)
    }
    chosen = [entry for entry in chosen if library_of(entry.family) in libraries]
    if not chosen:
        print("no model is tried: none has that name, or its library is missing", file=sys.stderr)
        return 1
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.zoo_preload"])
    rows = dict(kept_rows())

    def row(entry: Entry) -> None:
        versions = {"versions": libraries[library_of(entry.family)]}
        rows[entry] = {**entry._asdict(), **versions, **bounded(entry)}
        said = "works" if rows[entry]["works"] else rows[entry]["why"]
        print(f"{entry.family} | {entry.name}:{entry.task} | {said}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(asked.jobs) as pool:
        for _ in pool.map(row, chosen):
            listed = [rows[entry] for entry in entries() if entry in rows]
            report.keep("zoo", {"rows": listed}, seed=asked.seed)  # after each: Ctrl-C loses nothing
    PAGE.write_text(page(listed))
    if asked.json:
        print(json.dumps(listed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
