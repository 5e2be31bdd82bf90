"""`hetpeer plan --devices FILE --model MODEL`: who takes which blocks, of devices that differ."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpeer.peer.devices import NamedDevices
    from hetpeer.stages.planning.swarms.given import Work
    from hetpeer.stages.planning.swarms.search import Found

SCHEMA = "hetpeer.assignment/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmQuestion:
    """What is asked."""

    devices: Path
    model: str
    microbatches: int | None
    seconds: float
    """Of processor time, this program's start included."""
    seed: int


def plan_swarm(asked: SwarmQuestion, *, as_json: bool) -> None:
    """Search, and print the best plan. Raises `LocalError` HP-PLAN-002 … HP-PLAN-005."""
    from hetpeer.dht.errors import ExitCode, LocalError
    from hetpeer.peer.devices import read_devices
    from hetpeer.peer.workload import work_of
    from hetpeer.stages.planning.swarms.search import Search
    from hetpeer.stages.planning.swarms.short import lacking

    named = read_devices(asked.devices)
    work = work_of(asked.model, asked.microbatches)
    found = Search(named.devices, work, asked.seed).run(lambda: time.process_time() < asked.seconds)
    if found is None:
        most = int(named.devices.memory.argmax())
        raise LocalError(
            "HP-PLAN-005",
            f"{asked.model} does not fit into the memory of these {len(named.names)} devices",
            why=f"their {named.devices.memory.sum() / 2**30:.1f} GiB are too little, or lie in too small pieces",
            fix=f"it needs {lacking(named.devices, work, most) / 2**30:.1f} GiB more on {named.names[most]}, or more devices",
            exit_code=ExitCode.TOO_SMALL,
        )
    print(json.dumps(_document(found, named, work)) if as_json else "\n".join(_lines(found, named)))


def _document(found: Found, named: NamedDevices, work: Work) -> dict[str, Any]:
    best = found.best
    what, device = best.bottleneck
    used = {device for pipeline in best.pipelines for device in pipeline.devices}
    return {
        "schema": SCHEMA,
        "total_s": best.total_s,
        "pipeline_s": best.pipeline_s,
        "sync_s": best.sync_s,
        "microbatches": work.microbatches,
        "bottleneck": {"what": what, "device": named.names[device]},
        "pipelines": [
            {
                "microbatches": share,
                "period_s": one.period,
                "fill_s": one.fill,
                "stages": [
                    {"device": named.names[device], "blocks": list(one.cuts[place : place + 2])}
                    for place, device in enumerate(one.devices)
                ],
            }
            for one, share in zip(best.pipelines, best.shares, strict=True)
        ],
        "spared": [name for number, name in enumerate(named.names) if number not in used],
        "cpu_seconds": time.process_time(),
        "evaluations": found.evaluations,
    }


def _lines(found: Found, named: NamedDevices) -> Iterator[str]:
    """Plain text, one fact a line."""
    best = found.best
    what, device = best.bottleneck
    yield f"{'step':<10}{best.total_s:.2f} s: {best.pipeline_s:.2f} s for the pipelines, {best.sync_s:.2f} s for the gradients"
    for number, (one, share) in enumerate(zip(best.pipelines, best.shares, strict=True)):
        stages = " → ".join(
            f"{named.names[device]} {one.cuts[place]}-{one.cuts[place + 1] - 1}"
            for place, device in enumerate(one.devices)
        )
        yield f"{'pipeline':<10}{number}: {share} microbatches, one in {one.period:.2f} s: {stages}"
    used = {device for pipeline in best.pipelines for device in pipeline.devices}
    spared = [name for number, name in enumerate(named.names) if number not in used]
    if spared:
        yield f"{'spared':<10}{', '.join(spared)}"
    yield f"{'waits for':<10}{named.names[device]}, which is {what}"
    yield f"{'searched':<10}{found.evaluations} plans in {time.process_time():.1f} s of processor time"
