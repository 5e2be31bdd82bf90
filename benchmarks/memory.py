"""Memory of a volunteer: idle (joined, state loaded, nothing to do) and at work.

A run of two stages is joined by one volunteer, which waits; then by a second, and both work. Of the first
one's three processes RSS and PSS are read; shared pages (libraries, the arena) count in full in each RSS and
in parts in PSS. At work the figure is the highest of ten samples.

    python -m benchmarks.memory
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.swarm import WITHOUT_END, Model, Swarm, make_run, running

SAMPLES = 10
SAMPLE_S = 0.5
START_S = 180.0
WARM_UP_STEPS = 10
KINDS = {"volunteer": "daemon", "worker": "worker", "volunteer p2pd": "p2pd"}


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    model = Model(width=options.width, layers=options.layers)
    run = make_run(folder, model, 2, WITHOUT_END, options.seed)
    async with running(run, folder, 1) as swarm:
        first = await _settled(swarm)
        idle = await _highest(first)
        await swarm.add(2)
        await swarm.until(WARM_UP_STEPS, START_S)
        working = await _highest(first)
    parameters = sum(block.parameter_count for block in run.manifest.blocks)
    return {"parameters": parameters, "stages": 2, "idle": idle, "working": working}


async def _settled(swarm: Swarm) -> Mapping[str, psutil.Process]:
    """The first volunteer's processes by what they are, once it holds its blocks and is quiet."""
    async with asyncio.timeout(START_S):
        before = -1.0
        while True:
            await asyncio.sleep(2.0)
            swarm.check()
            found = {what: group[0] for kind, what in KINDS.items() if (group := swarm.processes()[kind])}
            spent = sum(sum(process.cpu_times()[:2]) for process in found.values())
            if len(found) == len(KINDS) and spent - before < 0.1:
                return found
            before = spent


async def _highest(processes: Mapping[str, psutil.Process]) -> dict[str, dict[str, float]]:
    """MiB by process and in all."""
    highest = {what: {"rss_mib": 0.0, "pss_mib": 0.0} for what in processes}
    for _ in range(SAMPLES):
        await asyncio.sleep(SAMPLE_S)
        for what, process in processes.items():
            info = process.memory_full_info()
            for name, value in (("rss_mib", info.rss), ("pss_mib", info.pss)):
                highest[what][name] = max(highest[what][name], round(value / 2**20, 1))
    names = ("rss_mib", "pss_mib")
    return highest | {"all": {n: round(sum(one[n] for one in highest.values()), 1) for n in names}}


def show(figures: dict[str, Any]) -> None:
    print(f"a volunteer with half of {figures['parameters']:,} parameters; MiB of RSS (PSS)")
    for state in ("idle", "working"):
        costs = [f"{w} {c['rss_mib']:.0f} ({c['pss_mib']:.0f})" for w, c in figures[state].items()]
        print(f"  {state:8} " + ", ".join(costs))


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("memory", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
