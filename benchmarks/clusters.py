"""A grouped run of real processes in the laboratory (root), trained to its end: what stragglers.py and
curves.py measure.

Four clusters, so far from each other that a batch takes its time without keeping this machine's two cores
busy.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.swarm import POLL_S, Model, Site, Swarm, make_run, running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.run.settings import AveragingSettings, LinkSettings, TrainingSettings
from hetpeer.peer.demo.demo_run import Seen
from tests.wanlab.lab import Lab

CLUSTERS, STAGES = 4, 2
LATENCY_MS = 25.0
WARM_UP = 10
"""Batches of each cluster before the clock starts: with a span of ten all have averaged once, and partners
have met.
"""
TRAIN_S = 600.0

Look = Callable[[Swarm, Sequence[Seen]], None]
"""Hears of all that is new in the log."""


def network(
    up_mbps: float,
    down_mbps: float,
    clusters: int = CLUSTERS,
    latency_ms: float = LATENCY_MS,
    stages: int = STAGES,
) -> dict[str, Any]:
    """Everybody equally far from everybody, with equal lines. Node 0 is the bootstrap's."""
    nodes = 1 + clusters * stages
    return {
        "nodes": nodes,
        "latency_ms": [[0.0 if a == b else latency_ms for a in range(nodes)] for b in range(nodes)],
        "uplink_mbps": [1000.0] + [up_mbps] * (nodes - 1),
        "downlink_mbps": [1000.0] + [down_mbps] * (nodes - 1),
    }


async def trained(
    lab: Lab,
    folder: Path,
    model: Model,
    training: TrainingSettings,
    averaging: AveragingSettings,
    *,
    links: LinkSettings | None = None,
    seed: int = 0,
    look: Look | None = None,
    count: int = CLUSTERS,
    stages: int = STAGES,
    cores: float | None = None,
    within_s: float = TRAIN_S,
) -> dict[str, Any]:
    """One run of `count` clusters of `stages`; each compute worker has `cores` of a processor.

    Raises AssertionError if a batch is missing in the end, or is there twice.
    """
    run = make_run(folder, model, stages, training, seed, links, averaging)
    parts = {} if cores is None else dict.fromkeys(range(1, 1 + count * stages), cores)
    async with running(run, folder, count * stages, site=Site(lab=lab, cores=parts)) as swarm:
        async with asyncio.timeout(within_s):
            while swarm.bootstrap.status is None:
                swarm.check()
                new = swarm.feed.poll()
                if look is not None:
                    look(swarm, new)
                await asyncio.sleep(POLL_S)
        swarm.feed.poll()
        records = swarm.feed.seen
    verdict = audit(run.path)
    assert verdict.ok, verdict.problems
    commits = [one for one in records if one.record["kind"] == "commit"]
    first = WARM_UP * count
    begun = commits[0].at - float(commits[0].record["seconds"])
    averages = [one.record for one in records if one.record["kind"] == "average"]
    evaluations = [one for one in records if one.record["kind"] == "evaluation"]
    losses = {one.record["batch"]: one.record["loss"] for one in evaluations}
    return {
        "batches_per_s": (len(commits) - first) / (commits[-1].at - commits[first - 1].at),
        "loss": losses[max(losses)],
        "evaluations": [(round(one.at - begun, 3), one.record["loss"]) for one in evaluations],
        "behind": [one.record.get("behind", 0) for one in commits],
        "curve": dict(sorted(losses.items())),
        "averages": dict(sorted(Counter(len(one["clusters"]) for one in averages).items())),
        "averaging_s": statistics.median(one["seconds"] for one in averages) if averages else 0.0,
        "dissolved": sum(one.record["kind"] == "dissolved" for one in records),
    }
