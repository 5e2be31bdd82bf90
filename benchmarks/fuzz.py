"""Every decoder of bytes from outside, fuzzed by atheris (libFuzzer): what breaks it, or gets through
though it should not?

Each target of tests/fuzz has processes of its own, one after the other: the first begins with its seeds and
with what tests/fuzz/corpus keeps, and the next with what that has reached, until there were so many
executions or minutes, or a finding. A finding is kept beside the corpus, where `make test` tries it from then
on. `--keep` adds to the corpus what ends as nothing in it does, the smallest first, as far as it stays small.

Each process is noted when it ends, in `--folder`, and the result file is written: interrupted, the same
command goes on where it was, also at another commit, as long as no decoder differs.

    make fuzz
    python -m benchmarks.fuzz --executions 20000 --targets bootstrap/run/manifest stages/state
    python -m tests.fuzz bootstrap/run/manifest FILE        # one input again, with a traceback
"""

from __future__ import annotations

import hashlib
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.journal import Journal, sources
from hetpeer.dht.base.runtime import dying_with_us
from tests.fuzz.target import CORPUS, attempt, ending, kept
from tests.fuzz.targets import every

EXECUTIONS, TOGETHER = 1_000_000, 10_000_000
"""Goals: of each, and of all."""
ROUND_S = 120
"""A process' time: no more than that is lost where the benchmark is cut off."""
TIMEOUT_S, MEMORY_MIB = 10, 2048
"""An input that takes longer or more is a finding."""
KEPT_FILES = 30
"""Inputs of a target's corpus at most."""
LARGEST = 1 << 10
"""Bytes of an input that is added to it."""
_FIGURES = {
    "executions": re.compile(r"^stat::number_of_executed_units: +(\d+)$", re.MULTILINE),
    "memory_mib": re.compile(r"^stat::peak_rss_mb: +(\d+)$", re.MULTILINE),
}
_PULSE = re.compile(r"^#(\d+)\t.* cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)


def result(options: Any) -> str:
    """Under which name the figures are kept."""
    return "fuzz-some" if options.targets else "fuzz"


def fuzzed(
    name: str, options: Any, journal: Journal, told: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """One target: what was reached, and the findings that ended it, if there are some.

    `told` hears of it after each process.
    """
    work = options.folder / name
    work.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, Any]] = []
    for number in itertools.count(1):
        part = f"{name} {number}"
        figures = together(rounds)
        left, seconds = options.executions - figures["executions"], 60 * options.minutes - figures["seconds"]
        if left <= 0 or seconds <= 0 or "status" in figures:
            break
        if part not in journal.done:
            journal.add(part, _round(name, work, left, min(ROUND_S, seconds), options.seed + number))
        rounds.append(journal.done[part])
        told(together(rounds))
    if options.keep and "status" not in figures:
        figures["added"] = _add(name, work)
    return figures


def together(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of processes that went on one after the other."""
    found: dict[str, Any] = {
        "executions": sum(one["executions"] for one in rounds),
        "seconds": round(sum(one["seconds"] for one in rounds), 1),
    }
    for what in ("coverage", "features", "corpus", "memory_mib"):
        if values := [one[what] for one in rounds if what in one]:
            found[what] = max(values)
    return found | {
        what: rounds[-1][what] for what in ("findings", "status", "said") if rounds and what in rounds[-1]
    }


def _round(name: str, work: Path, executions: int, seconds: float, seed: int) -> dict[str, Any]:
    """One process, which leaves in `work` what it has reached."""
    with tempfile.TemporaryDirectory(prefix="hetpeer-fuzz-") as folder:
        findings = Path(folder)
        flags = [
            f"-runs={executions}",
            f"-max_total_time={max(1, round(seconds))}",
            f"-seed={seed}",  # 0 would be the time of day
            f"-timeout={TIMEOUT_S}",
            f"-rss_limit_mb={MEMORY_MIB}",
            f"-artifact_prefix={findings}/",
            "-print_final_stats=1",
        ]
        command = [sys.executable, "-m", "tests.fuzz", name, "--", *flags, str(work)]
        began = time.monotonic()
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            preexec_fn=dying_with_us(),
        )
        figures: dict[str, Any] = {"executions": 0, "seconds": round(time.monotonic() - began, 1)}
        said = ended.stdout.decode(errors="replace")
        if pulses := _PULSE.findall(said):
            reached = ("executions", "coverage", "features", "corpus")
            figures |= dict(zip(reached, map(int, pulses[-1]), strict=True))
        figures |= {what: int(found[1]) for what, line in _FIGURES.items() if (found := line.search(said))}
        broken = [_kept(name, path.read_bytes()) for path in sorted(findings.iterdir())]
        if ended.returncode or broken:
            figures |= {"findings": broken, "status": ended.returncode, "said": _last_words(said)}
        return figures


def _kept(name: str, data: bytes) -> str:
    """The input that broke `name`, where `make test` tries it."""
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path.relative_to(CORPUS.parents[2]))


def _last_words(said: str) -> list[str]:
    """The traceback, or how it ended otherwise."""
    lines = [line for line in said.splitlines() if not line.startswith(("INFO", "#", "stat::"))]
    begins = [
        number for number, line in enumerate(lines) if "Traceback" in line or "ERROR: libFuzzer" in line
    ]
    return [line[:300] for line in lines[begins[0] if begins else -20 :]][:60]


def _add(name: str, work: Path) -> int:
    """Keep the smallest input in `work` of each way to end that seeds and corpus do not have, as far as
    there is room.
    """
    target = every()[name]
    room = KEPT_FILES - len(kept(name))
    there = {ending(attempt(target, data)) for data in (*target.seeds(), *kept(name))}
    added = 0
    for data in sorted({path.read_bytes() for path in work.iterdir()}, key=len):
        if added < room and len(data) <= LARGEST and (found := ending(attempt(target, data))) not in there:
            _kept(name, data)
            there.add(found)
            added += 1
    return added


def measure(options: Any) -> dict[str, Any]:
    everything = list(every())  # loads all that is hashed
    names = options.targets or everything
    options.folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.folder / "fuzz.journal", sources=sources("tests.fuzz"), seed=options.seed)
    targets: dict[str, Any] = {}

    def told(name: str, figures: dict[str, Any]) -> None:
        targets[name] = figures
        report.keep(result(options), judged(names, targets, journal, options.executions), seed=options.seed)

    for name in names:
        targets[name] = fuzzed(name, options, journal, partial(told, name))
        if not options.json:
            _tell(name, targets[name])
    return judged(names, targets, journal, options.executions)


def judged(names: Sequence[str], targets: dict[str, Any], journal: Journal, each: int) -> dict[str, Any]:
    """The figures of `targets`, which are those of `names` that have begun, and which goals are met."""
    executions = sum(figures["executions"] for figures in targets.values())
    few = [name for name in names if name not in targets or targets[name]["executions"] < each]
    goals = {
        "nothing found": not any("status" in figures for figures in targets.values()),
        f"{each:,} executions each": not few,
    }
    if len(names) == len(every()):
        goals[f"{TOGETHER:,} executions in all"] = executions >= TOGETHER
    return {
        "commits": sorted(journal.commits),
        "targets": targets,
        "executions": executions,
        "seconds": round(sum(figures["seconds"] for figures in targets.values())),
        "findings": [path for figures in targets.values() for path in figures.get("findings", [])],
        "few": few,
        "goals": goals,
        "met": all(goals.values()),
    }


def _tell(name: str, figures: dict[str, Any]) -> None:
    reached = f"cov {figures.get('coverage', 0)}, corpus {figures.get('corpus', 0)}"
    print(
        f"{name:24} {figures['executions']:9,} executions in {figures['seconds']:7.1f} s, {reached}",
        flush=True,
    )
    for path in figures.get("findings", []):
        print(f"    python -m tests.fuzz {name} {path}")
    for line in figures.get("said", []):
        print(f"    {line}")


def show(figures: dict[str, Any]) -> None:
    print(
        f"{len(figures['targets'])} decoders, {figures['executions']:,} executions in {figures['seconds']} s:"
        f" {len(figures['findings'])} findings"
    )
    if figures["few"]:
        print(f"  fewer executions than asked for: {', '.join(figures['few'])}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--executions", type=int, default=EXECUTIONS, help="of each (default: 1,000,000)")
    parser.add_argument("--minutes", type=float, default=60, help="of each, at most (default: 60)")
    parser.add_argument("--targets", nargs="*", default=[], help="some of them (default: all)")
    parser.add_argument("--keep", action="store_true", help="add what is reached to the corpus")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("fuzz-run"),
        help="where to note what is done, and to leave what is reached (default: ./fuzz-run)",
    )
    options = parser.parse_args()
    return report.finish(result(options), measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
