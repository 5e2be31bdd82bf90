"""Every decoder of bytes from outside, fuzzed by atheris (libFuzzer): what breaks it, or gets through though it should not?

Each target of tests/fuzz has a process of its own, which begins with its seeds and with what tests/fuzz/corpus keeps, and ends after so
many executions or minutes, or with the first finding. A finding is kept beside the corpus, where `make test` tries it from then on. `--keep` adds
to the corpus what ends as nothing in it does, the smallest first, as far as it stays small.

    make fuzz
    python -m benchmarks.fuzz --executions 20000 --targets bootstrap/manifest stages/state
    python -m tests.fuzz bootstrap/manifest FILE        # one input again, with a traceback
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.fuzz.target import CORPUS, attempt, ending, kept
from tests.fuzz.targets import every

EXECUTIONS = 1_000_000
"""Goal: of each."""
TIMEOUT_S, MEMORY_MIB = 10, 2048
"""An input that takes longer or more is a finding."""
KEPT_FILES = 30
"""Of a target's corpus."""
LARGEST = 1 << 10
"""Bytes of an input that is added to it."""
_FIGURES = {
    "executions": re.compile(r"^stat::number_of_executed_units: +(\d+)$", re.MULTILINE),
    "memory_mib": re.compile(r"^stat::peak_rss_mb: +(\d+)$", re.MULTILINE),
}
_PULSE = re.compile(r"^#(\d+)\t.* cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)


def fuzzed(name: str, options: Any) -> dict[str, Any]:
    """One target: what was reached, and the finding that ended it, if there is one."""
    with tempfile.TemporaryDirectory(prefix="hetpeer-fuzz-") as folder:
        work, findings = Path(folder) / "work", Path(folder) / "findings"
        work.mkdir()
        findings.mkdir()
        flags = [
            f"-runs={options.executions}",
            f"-max_total_time={round(60 * options.minutes)}",
            f"-seed={options.seed + 1}",  # 0 would be the time of day
            f"-timeout={TIMEOUT_S}",
            f"-rss_limit_mb={MEMORY_MIB}",
            f"-artifact_prefix={findings}/",
            "-print_final_stats=1",
        ]
        command = [sys.executable, "-m", "tests.fuzz", name, "--", *flags, str(work)]
        began = time.monotonic()
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        seconds = time.monotonic() - began
        said = ended.stdout.decode(errors="replace")
        figures: dict[str, Any] = {"executions": 0, "seconds": round(seconds, 1)}
        if pulses := _PULSE.findall(said):
            reached = ("executions", "coverage", "features", "corpus")
            figures |= dict(zip(reached, map(int, pulses[-1]), strict=True))
        figures |= {what: int(found[1]) for what, line in _FIGURES.items() if (found := line.search(said))}
        broken = [_kept(name, path.read_bytes()) for path in sorted(findings.iterdir())]
        if ended.returncode or broken:
            figures |= {"findings": broken, "status": ended.returncode, "said": _last_words(said)}
        elif options.keep:
            figures["added"] = _add(name, work)
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
    """Keep the smallest input in `work` of each way to end that seeds and corpus do not have, as far as there is room."""
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
    targets: dict[str, Any] = {}
    for name in options.targets or every():
        targets[name] = fuzzed(name, options)
        if not options.json:
            _tell(name, targets[name])
    executions = sum(figures["executions"] for figures in targets.values())
    findings = [path for figures in targets.values() for path in figures.get("findings", [])]
    few = [name for name, figures in targets.items() if figures["executions"] < options.executions]
    return {
        "targets": targets,
        "executions": executions,
        "seconds": round(sum(figures["seconds"] for figures in targets.values())),
        "findings": findings,
        "few": few,
        "met": not any("status" in figures for figures in targets.values()) and not few,
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
        print(f"fewer executions than asked for: {', '.join(figures['few'])}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--executions", type=int, default=EXECUTIONS, help="of each (default: 1,000,000)")
    parser.add_argument("--minutes", type=float, default=60, help="of each, at most (default: 60)")
    parser.add_argument("--targets", nargs="*", default=[], help="some of them (default: all)")
    parser.add_argument("--keep", action="store_true", help="add what is reached to the corpus")
    options = parser.parse_args()
    return report.finish("fuzz", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
