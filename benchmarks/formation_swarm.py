"""Formation of clusters by real processes: eight uneven volunteers that arrive in the worst order, divided by
what they advertise, beside formation by arrival.

The laboratory (root) gives each its line (uplinks of 5 to 100 Mbit/s) and its part of a processor (speeds
1 : 4), and each offers main memory for half of the model or more, as in `benchmarks.formation`, which also
says by its model which order is the worst, and what is the best division found offline. Both runs have the
same volunteers in the same order; `by arrival` is `bootstrap --keep-places`. A volunteer comes twelve seconds
after the one before, or when that has its place if it is later. Counted are the batches that all clusters
commit in two minutes, which begin two minutes after the last volunteer has its place. Whoever has made no
update in that time waits. The swarm's own division is priced with the true lines and speeds, too, and
`events` says when clusters were founded and fell apart. Both ways together take about 13 minutes.

    python -m benchmarks.formation_swarm
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.eight import HAS_A_PLACE, LOOK_S
from benchmarks.formation import (
    BETTER,
    DOWN,
    INTERVAL,
    LONG,
    NEAR,
    ORDERS,
    ROOM,
    SEEDS,
    STAGES,
    VOLUNTEERS,
    by_arrival,
    half_of,
    looks,
    volunteers,
)
from benchmarks.swarm import ENDLESS, NEVER, Model, Site, Swarm, make_run, running
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings, TrainingSettings
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.stages.block.device import measure_flops
from hetpeer.stages.planning.swarms.clusters import Clusters, clusters_of, divided
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from tests.wanlab.lab import Lab

MODEL = Model(width=256, layers=8, sequence_length=128)
TRAINING = TrainingSettings(
    steps=ENDLESS, batch_size=16, microbatch_size=2, eval_every=NEVER, checkpoint_every=NEVER
)
CORES = 0.05, 0.2
"""Parts of a processor of the slowest and the fastest."""
SPACING_S = 12.0
"""Seconds from one arrival to the next, at least."""
SETTLE_S, COUNTED_S = 120.0, 120.0
LAST_EVENTS = 64
"""Lines of a volunteer's log that tell its blocks."""
BITS, MEGA, MIB = 8, 1e6, 2**20
OF_A_PLACE = 7 / 8
"""Part of the remaining memory that a place gets; an eighth is for bundles (docs/limits.md, RAM)."""
PROGRAM = re.compile(r"the program itself takes ([\d.]+) MiB")
WITHIN_S = 300.0


def network(devices: Devices) -> dict[str, Any]:
    """Arguments of Lab: the bootstrap node, five milliseconds from everybody, and the devices."""
    latency = np.full((VOLUNTEERS + 1, VOLUNTEERS + 1), 5.0)
    latency[1:, 1:] = 1e3 * devices.latency
    np.fill_diagonal(latency, 0.0)
    up = (BITS / MEGA * devices.uplink).tolist()
    return {
        "nodes": VOLUNTEERS + 1,
        "latency_ms": latency.tolist(),
        "uplink_mbps": [1000.0, *up],
        "downlink_mbps": [1000.0, *(DOWN * one for one in up)],
    }


def made(folder: Path, seed: int) -> RunDirectory:
    folder.mkdir()
    return make_run(folder, MODEL, STAGES, TRAINING, seed, averaging=AveragingSettings(interval=INTERVAL))


def worst(devices: Devices, demand: StepDemand, seed: int) -> tuple[list[int], Clusters]:
    """The worst of many orders of arrival that found clusters, and its clusters, by the model."""
    cuts, random = PipelineCuts(devices, demand), np.random.default_rng(seed)
    orders = [random.permutation(VOLUNTEERS).tolist() for _ in range(ORDERS)]
    found = [(order, clusters) for order in orders if (clusters := by_arrival(cuts, order)) is not None]
    return min(found, key=lambda one: one[1].batches_per_s)


async def program_bytes(run: RunDirectory, folder: Path, devices: Devices) -> float:
    """Main memory that hetpeer takes at a volunteer without anything of a model, as it says itself."""
    with Lab(network(devices)) as lab:
        async with running(run, folder, 1, site=Site(lab=lab, cores={1: 1.0})) as swarm:
            async with asyncio.timeout(WITHIN_S):
                while (said := PROGRAM.search(swarm.said(1))) is None:
                    swarm.check()
                    await asyncio.sleep(0.2)
    return float(said[1]) * MIB


async def trained(
    run: RunDirectory,
    folder: Path,
    devices: Devices,
    cores: Sequence[float],
    order: Sequence[int],
    **way: Any,
) -> dict[str, Any]:
    """Batches a second of one swarm, who is in which cluster (by device), and who waits."""
    program = way.pop("program")
    limits = [f"{(program + room / OF_A_PLACE) / MIB:.0f}MiB" for room in devices.memory]
    with Lab(network(devices)) as lab:
        parts = {device + 1: part for device, part in enumerate(cores)}
        async with running(run, folder, 0, site=Site(lab=lab, cores=parts, **way)) as swarm:
            for device in order:
                begun = time.monotonic()
                await swarm.add(device + 1, "--ram-limit", limits[device])
                async with asyncio.timeout(WITHIN_S):
                    while not HAS_A_PLACE.search(swarm.said(device + 1)):
                        await polled(swarm, time.monotonic() + LOOK_S)
                if device != order[-1]:
                    await polled(swarm, begun + SPACING_S)
            came = time.monotonic()
            await polled(swarm, came + SETTLE_S)
            before, known = committed(swarm), [events(swarm, device) for device in range(VOLUNTEERS)]
            await polled(swarm, came + SETTLE_S + COUNTED_S)
            after = committed(swarm)
            blocks: dict[int, list[tuple[tuple[int, int], int]]] = defaultdict(list)
            for device in range(VOLUNTEERS):
                told = events(swarm, device)
                if len(told) > len(known[device]):
                    cluster, place = place_of(told)
                    blocks[cluster].append((place, device))
            changes = [
                [round(one.at - came, 1), one.record["kind"], one.record["cluster"]]
                for one in swarm.feed.seen
                if one.record["kind"] in ("founded", "dissolved")
            ]
    return {
        "batches_per_s": (after - before) / COUNTED_S,
        "clusters": [[[*place, device] for place, device in sorted(one)] for one in blocks.values()],
        "waiting": VOLUNTEERS - sum(map(len, blocks.values())),
        "events": changes,
    }


def events(swarm: Swarm, device: int) -> list[str]:
    """Lines of the log of a volunteer's updates."""
    path = swarm.home(device + 1) / "runs" / swarm.run.run_id / "events.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def place_of(told: Sequence[str]) -> tuple[int, tuple[int, int]]:
    """The cluster of the last of these updates, and the blocks that were updated there."""
    records = [json.loads(line)["record"] for line in told[-LAST_EVENTS:]]
    cluster = int(records[-1]["cluster"])
    blocks = [int(one["block"]) for one in records if one["cluster"] == cluster]
    return cluster, (min(blocks), max(blocks) + 1)


async def polled(swarm: Swarm, until: float) -> None:
    """Read the log until then."""
    while time.monotonic() < until:
        swarm.check()
        swarm.feed.poll()
        await asyncio.sleep(0.5)


def committed(swarm: Swarm) -> int:
    return sum(one.record["kind"] == "commit" for one in swarm.feed.seen)


def priced(found: Sequence[Sequence[Sequence[int]]], devices: Devices, demand: StepDemand) -> float:
    """Batches a second of these clusters by the model, without replicas; 0 if one of them does not fit."""
    cuts, made = PipelineCuts(devices, demand), []
    for places in found:
        line = sorted({(begin, end): device for begin, end, device in places}.items())
        one = cuts.at(tuple(device for _, device in line), (0, *(end for (_, end), _ in line)))
        if one is None:
            return 0.0
        made.append(one)
    return clusters_of(devices, demand, made).batches_per_s if made else 0.0


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    example = made(folder / "example", options.seed)
    demand = of_manifest(example.manifest, example.manifest.training.microbatches)
    torch.set_num_threads(1)  # as a worker has
    speed = measure_flops(torch.device("cpu"))
    devices = volunteers(options.seed, demand, (CORES[0] * speed, CORES[1] * speed))
    cores = (devices.flops / speed).tolist()
    order, slow = worst(devices, demand, options.seed)
    long = [divided(devices, demand, other, looks(LONG)) for other in range(1, 1 + SEEDS)]
    offline = max((one for one in long if one is not None), key=lambda one: one.batches_per_s)
    program = await program_bytes(example, folder / "example", devices)
    found: dict[str, list[dict[str, Any]]] = {"by arrival": [], "divided": []}
    for turn in range(options.rounds):
        for way, runs in found.items():
            place = folder / f"{way} {turn}"
            run = made(place, options.seed + turn)
            kept = {"keep_places": way == "by arrival", "program": program}
            runs.append(one := await trained(run, place, devices, cores, order, **kept))
            one["by_the_model"] = priced(one["clusters"], devices, demand)
            print(f"{way}: {one}", file=sys.stderr, flush=True)
    middle = {way: statistics.median(one["batches_per_s"] for one in runs) for way, runs in found.items()}
    divisions = [one["by_the_model"] for one in found["divided"]]
    goals = {
        f"{BETTER:g} times the batches of formation by arrival": middle["divided"]
        >= BETTER * middle["by arrival"],
        f"by the model at least {NEAR:g} of the best division found offline": min(divisions)
        >= NEAR * offline.batches_per_s,
        "nobody waits who could fit": not any(one["waiting"] for one in found["divided"]),
    }
    return {
        "order": order,
        "cores": [round(one, 3) for one in cores],
        "up_mbps": [round(BITS * one / MEGA, 1) for one in devices.uplink],
        "room_mib": [round(one / MIB, 1) for one in devices.memory],
        "half_mib": round(half_of(demand) / MIB, 1),
        "ram_needed": ROOM,
        "by_the_model": {
            "by arrival": slow.batches_per_s,
            "offline": offline.batches_per_s,
        },
        "batches_per_s": middle,
        "ratio": middle["divided"] / max(middle["by arrival"], 1e-9),
        "runs": found,
        "goals": goals,
        "met": all(goals.values()),
    }


def show(figures: dict[str, Any]) -> None:
    model = figures["by_the_model"]
    for way, rate in figures["batches_per_s"].items():
        prices = [one["by_the_model"] for one in figures["runs"][way]]
        print(
            f"{way:12} {rate:.3f} batches/s; by the model {statistics.median(prices):.3f} "
            f"(foreseen by arrival {model['by arrival']:.3f}, offline {model['offline']:.3f})"
        )
    print(f"divided: {figures['ratio']:.2f} times as many")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each way (default: 1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("formation-swarm", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
