"""Formation of clusters: volunteers divided by what they advertise, beside formation by arrival and Ravnest's
genetic search; by the planner's model.

Eight volunteers with speeds 1 : 4 and uplinks of 5 to 100 Mbit/s, each with room for half of a small GPT or
more. By arrival they take the places of the run's own cut one after the other: in the middle and the worst of
sampled orders. Ravnest's search divides them by memory and bandwidth; its clusters are then cut by our
planner, in the best order of four or fewer, so that only who is with whom differs. `offline` is the best of
long searches with several seeds. All are priced alike: batches a second of all clusters, averages included,
and Ravnest's balance, the seconds between the quickest and the slowest cluster's batch. Nothing is timed.

    python -m benchmarks.formation
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.baselines.ravnest import genetic
from hetpeer.peer.planning.model_workload import Gpt, preset
from hetpeer.stages.planning.swarms.clusters import Clusters, clusters_of, divided
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts, PlannedPipeline
from hetpeer.stages.planning.swarms.plan_inputs import Averaging, Devices, StepDemand

VOLUNTEERS, STAGES = 8, 2
MODEL = Gpt(layers=8, width=256, vocabulary=5000, context=256)
MICROBATCHES, INTERVAL = 8, 10
SLOWEST, FASTEST = 10e9, 40e9
"""FLOP/s."""
UPLINKS = 5e6 / 8, 100e6 / 8
"""Bytes/s."""
DOWN = 4.0
"""Downlink over uplink."""
ROOM = 1.15, 2.5
"""Memory of a volunteer, as a multiple of what half of the model takes."""
ORDERS = 400
LOOKS, LONG, SEEDS = 400, 2000, 3
"""Questions whether there is time: of the search, and of each that is called offline."""
BETTER, NEAR = 1.5, 0.9
"""Goals: over the worst arrival, and of offline."""


def work() -> StepDemand:
    return replace(preset(MODEL, MICROBATCHES), averaging=Averaging(interval=INTERVAL))


def half_of(demand: StepDemand) -> float:
    """Bytes that the larger half of the model takes at a device, in training."""
    middle = len(demand) // 2
    most = max(demand.memory[:middle].sum(), demand.memory[middle:].sum())
    return float(most + 8 * demand.kept[:middle].sum())


def volunteers(seed: int, demand: StepDemand, speeds: tuple[float, float] = (SLOWEST, FASTEST)) -> Devices:
    """Speeds and uplinks in geometric steps, which of whom is chance, as is memory for `demand`."""
    random = np.random.default_rng(seed)
    up = random.permutation(np.geomspace(*UPLINKS, VOLUNTEERS))
    latency = random.uniform(0.005, 0.06, (VOLUNTEERS, VOLUNTEERS))
    latency = (latency + latency.T) / 2
    np.fill_diagonal(latency, 0.0)
    return Devices(
        flops=random.permutation(np.geomspace(*speeds, VOLUNTEERS)),
        memory=half_of(demand) * random.uniform(*ROOM, VOLUNTEERS),
        uplink=up,
        latency=latency,
        bandwidth=np.minimum(up[:, None], DOWN * up[None, :]),
    )


def looks(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is not None


def by_arrival(cuts: PipelineCuts, order: Iterable[int]) -> Clusters | None:
    """Clusters in order of arrival, with the run's own cut; the larger place of a cluster goes first."""
    blocks = len(cuts.work)
    layout = tuple(blocks * stage // STAGES for stage in range(STAGES + 1))
    memory = [cuts.work.memory[begin:end].sum() for begin, end in pairwise(layout)]
    places = sorted(range(STAGES), key=lambda place: -memory[place])
    found = []
    for group in _groups(order):
        seats = [device for _, device in sorted(zip(places, group, strict=True))]
        one = cuts.at(tuple(seats), layout)
        if one is None:
            return None
        found.append(one)
    return clusters_of(cuts.devices, cuts.work, found)


def _groups(order: Iterable[int]) -> Iterable[tuple[int, ...]]:
    devices = list(order)
    return [tuple(devices[at : at + STAGES]) for at in range(0, len(devices), STAGES)]


def by_ravnest(cuts: PipelineCuts, seed: int) -> Clusters | None:
    """Ravnest's clusters, each in its best order."""
    devices, demand = cuts.devices, cuts.work
    half = devices.memory.min() / ROOM[0]
    clustering = genetic(devices.memory, devices.uplink, 2 * half, seed)
    if clustering is None:
        return None
    found: list[PlannedPipeline] = []
    for cluster in np.unique(clustering):
        members = np.flatnonzero(clustering == cluster).tolist()
        made = [one for one in map(cuts.best, itertools.permutations(members)) if one is not None]
        if made:
            found.append(min(made, key=lambda one: one.seconds(demand.microbatches)))
    return clusters_of(devices, demand, found) if found else None


def row(clusters: Clusters | None) -> dict[str, Any]:
    if clusters is None:
        return {"batches_per_s": 0.0}
    return {
        "batches_per_s": clusters.batches_per_s,
        "imbalance_s": clusters.imbalance_s,
        "clusters": [list(one.devices) for one in clusters.plan.pipelines],
        "spare": len(clusters.spare),
    }


def solve(seed: int) -> dict[str, dict[str, Any]]:
    """Way → figures, of one network."""
    demand = work()
    devices = volunteers(seed, demand)
    cuts, random = PipelineCuts(devices, demand), np.random.default_rng(seed)
    arrived = [by_arrival(cuts, random.permutation(VOLUNTEERS).tolist()) for _ in range(ORDERS)]
    ranked = sorted((one for one in arrived if one is not None), key=lambda one: one.batches_per_s)
    long = [divided(devices, demand, other, looks(LONG)) for other in range(1, 1 + SEEDS)]
    ways = {
        "arrival, worst": ranked[0] if ranked else None,
        "arrival, middle": ranked[len(ranked) // 2] if ranked else None,
        "Ravnest": by_ravnest(cuts, seed),
        "hetpeer": divided(devices, demand, 0, looks(LOOKS)),
        "offline": max((one for one in long if one is not None), key=lambda one: one.batches_per_s),
    }
    return {way: row(one) for way, one in ways.items()}


def measure(options: Any) -> dict[str, Any]:
    found = {}
    for seed in range(options.seed, options.seed + options.networks):
        found[str(seed)] = solve(seed)
        print(seed, {w: round(r["batches_per_s"], 4) for w, r in found[str(seed)].items()}, file=sys.stderr)

    def over(way: str) -> list[float]:
        return [
            one["hetpeer"]["batches_per_s"] / max(one[way]["batches_per_s"], 1e-12) for one in found.values()
        ]

    goals = {
        f"at least {BETTER:g} times formation by the worst arrival": min(over("arrival, worst")) >= BETTER,
        f"at least {NEAR:g} of the best found offline": min(over("offline")) >= NEAR,
        "nobody waits who could fit": not any(one["hetpeer"]["spare"] for one in found.values()),
    }
    return {"found": found, "goals": goals, "met": all(goals.values())}


def show(figures: dict[str, Any]) -> None:
    networks = figures["found"].values()
    for way in next(iter(networks)):
        rates = [one[way]["batches_per_s"] for one in networks]
        balance = [one[way].get("imbalance_s", float("nan")) for one in networks]
        parts = [
            one["hetpeer"]["batches_per_s"] / one[way]["batches_per_s"]
            for one in networks
            if one[way]["batches_per_s"]
        ]
        print(
            f"{way:16} {statistics.median(rates):.4f} batches/s in the middle, imbalance "
            f"{statistics.median(balance):.1f} s; hetpeer {min(parts):.2f} to {max(parts):.2f} times as many"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--networks", type=int, default=10, help="networks (default: 10)")
    options = parser.parse_args()
    return report.finish("formation", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
