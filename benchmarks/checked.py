"""Cost of spot checks (others compute a share of the contributions again) and of proofs of all sums:
the same run with more and more spot checks.

Two stages with three holders each, so that there is always one to check and a third to decide, on this
machine's loopback; everybody is honest. The processes share the cores, so a step takes as long as all their
work. Ways take turns; steps an hour, processor seconds and bytes of a step are of the middle run.

    python -m benchmarks.checked
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.swarm import WITHOUT_END, Model, Swarm, cpu_seconds, make_run, running
from hetpeer.bootstrap.run.settings import TrustSettings

VOLUNTEERS, STAGES = 6, 2
SHARES = (0.0, 0.01, 0.05, 0.2, 1.0)
"""Shares of contributions that are checked.

The second is for the proofs, which are of every sum wherever there are checks.
"""
MODEL = Model(width=256, layers=4, heads=4, sequence_length=128)
WITHIN_S = 300.0
JUDGED, WORSE = 0.2, 0.25
"""Goal: with a fifth checked a step costs so much more at most. The computing alone is a fifth."""


def taken(swarm: Swarm) -> tuple[float, float, int]:
    """Clock, processor seconds of all processes, and bytes on the loopback so far."""
    processes = [one for group in swarm.processes().values() for one in group]
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    return time.monotonic(), sum(cpu_seconds(processes)), sent


async def trained(folder: Path, options: Any, share: float) -> dict[str, float]:
    """One run with this share of spot checks."""
    training = WITHOUT_END.model_copy(
        update={"batch_size": options.microbatches * 2, "microbatch_size": 2, "slot_size": 2}
    )
    trust = TrustSettings(spot_checks=share)
    run = make_run(folder, MODEL, STAGES, training, options.seed, trust=trust)
    async with running(run, folder, VOLUNTEERS) as swarm:
        await swarm.until(options.settle, WITHIN_S)
        before = taken(swarm)
        await swarm.until(options.settle + options.steps, WITHIN_S)
        passed, cpu, sent = (now - then for now, then in zip(taken(swarm), before, strict=True))
        unwanted = [seen.record for seen in swarm.feed.seen if seen.record["kind"] in ("banned", "dispute")]
    assert not unwanted, unwanted
    return {
        "steps_per_hour": 3600 * options.steps / passed,
        "cpu_s": cpu / options.steps,
        "bytes": sent / options.steps,
    }


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    runs: dict[float, list[dict[str, float]]] = {share: [] for share in options.shares}
    for turn in range(options.rounds):
        for share in options.shares:
            place = folder / f"{turn}-{share}"
            place.mkdir()
            runs[share].append(await trained(place, options, share))
            print(f"q = {share}: {runs[share][-1]}", file=sys.stderr, flush=True)
    ways = {
        share: {name: statistics.median(run[name] for run in found) for name in found[0]}
        for share, found in runs.items()
    }
    ratios = {share: against(ways[share], ways[options.shares[0]]) for share in options.shares[1:]}
    return {
        "volunteers": VOLUNTEERS,
        "stages": STAGES,
        "model": asdict(MODEL),
        "ways": ways,
        "ratios": ratios,
        "runs": runs,
        "met": ratios[JUDGED]["cpu_s"] <= 1 + WORSE if JUDGED in ratios else True,
    }


def against(way: Mapping[str, float], plain: Mapping[str, float]) -> dict[str, float]:
    return {name: round(way[name] / plain[name], 3) for name in way}


def show(figures: dict[str, Any]) -> None:
    for share, way in figures["ways"].items():
        ratios = figures["ratios"].get(share)
        more = f"  {', '.join(f'{name} {ratio:.2f}x' for name, ratio in ratios.items())}" if ratios else ""
        print(
            f"q = {share:4}: {way['steps_per_hour']:6.0f} steps/h, {way['cpu_s']:.2f} CPU s and "
            f"{way['bytes'] / 1e6:.1f} MB a step{more}"
        )
    print(
        f"  a step with q = {JUDGED} at most {1 + WORSE:.2f}x the CPU: "
        f"{'met' if figures['met'] else 'MISSED'}"
    )


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("microbatches", 12, "of a step"),
        ("settle", 3, "steps that do not count"),
        ("steps", 10, "steps that do"),
        ("rounds", 5, "runs of each way"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="the ways")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-checked-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("checked", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
