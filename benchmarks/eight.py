"""Eight volunteers in DT-FM's eight regions of the world, two pipelines of four stages: hetpeer with its
plan, in both natural orders, and torch's mesh.

The same GPT, data and optimizer in the laboratory (root), with the regions' latencies and bandwidths. The
plan is that of `hetpeer plan --matrices`: who is in which pipeline, and in which stage. `by region` has
neighbours in one pipeline, `strided` in one stage, in the order in which DT-FM lists the regions. torch has
1F1B over gloo and an all-reduce over the two processes of each stage (a Megatron-like mesh), laid out by the
plan, and by region.

`by itself`: nobody gives the swarm a plan. The volunteers come one after the other, in the order of the list
and in another one, choose their places, and are moved by the live planner until it finds nothing any more;
then steps are measured.

All nine machines share this machine's cores, so that a step is computed eight times as slowly as it would be:
what lines cost is a smaller part of it. Tokens/s are of the middle step.

    python -m benchmarks.eight
    python -m benchmarks.eight --orders plan --codecs none
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.endtoend_ways import INTERFACE, script, told
from benchmarks.swarm import ENDLESS, NEVER, Model, Site, Swarm, make_run, running
from hetpeer.averaging.member.position import choose_place
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import LinkSettings, TrainingSettings
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.peer.process.hetpeer_children import end_all
from hetpeer.peer.reliable.proposal_timing import AGAIN_S, SETTLED_S
from hetpeer.stages.pipeline.place_memory import Offered
from hetpeer.stages.planning.device_network import DeviceNetwork
from hetpeer.stages.planning.grids.grid_costs import Prices, StepTraffic
from hetpeer.stages.planning.grids.grid_search import search
from tests.wanlab.lab import MATRICES, Lab

STAGES, REPLICAS = 4, 2
PEERS = STAGES * REPLICAS
WITHIN_S, LOOK_S = 1800.0, 0.2
HAS_A_PLACE = re.compile(r"getting blocks? \S+ ready")
"""A volunteer says so once it has its place."""
LOOKS = 200
BY_ITSELF = "by itself"
ORDERS = ("plan", "by region", "strided", BY_ITSELF)
CODECS = {"none": LinkSettings(), "AdaTopK": LinkSettings(codec="topk-int4", ratio=100.0)}
ARRIVALS = {"listed": (0, 1, 2, 3, 4, 5, 6, 7), "mixed": (4, 6, 7, 5, 2, 1, 0, 3)}
"""Devices in the orders in which they come by themselves."""
NEAR, FASTER = 1.1, 1.8
"""Goals: a step of the swarm by itself over one with the plan, and torch's with the plan over it."""
SEQUENCE = 128
FLOAT_BYTES = 4
Grid = list[list[int]]
"""The device (region) of pipeline i at stage j."""


class Way(NamedTuple):
    """One of the compared ways to train."""

    engine: str
    order: str
    """The name of the order of places, or of arrival."""
    codec: str = "none"

    @property
    def name(self) -> str:
        """`hetpeer, plan, AdaTopK`, for people and folders."""
        return ", ".join([self.engine, self.order, *([self.codec] if self.codec != "none" else [])])


def world() -> dict[str, Any]:
    """Arguments of Lab: the bootstrap node is in Oregon, beside the first volunteer."""
    matrix: dict[str, Any] = json.loads((MATRICES / "regions.json").read_text())
    at = [0, *range(PEERS)]
    tables = {key: [[matrix[key][a][b] for b in at] for a in at] for key in ("latency_ms", "bandwidth_mbps")}
    tables["bandwidth_mbps"][0][1] = tables["bandwidth_mbps"][1][0] = 100.0
    return matrix | tables | {"names": ["bootstrap", *matrix["names"]]}


def orders(run: RunDirectory) -> dict[str, Grid]:
    """Name of an order → the device at each place."""
    matrix = json.loads((MATRICES / "regions.json").read_text())
    network = DeviceNetwork(
        np.array(matrix["latency_ms"]) / 1e3,
        np.array(matrix["bandwidth_mbps"]) / 1e3 + np.eye(PEERS),
    )
    manifest = run.manifest
    blocks = manifest.blocks
    activations = max(block.output_bytes for block in blocks) * manifest.training.microbatches / REPLICAS
    gradients = max(sum(b.vector_count for b in blocks[i:j]) for i, j in manifest.layouts[0]) * FLOAT_BYTES
    prices = Prices(
        network, StepTraffic(gradient_gb=gradients / 1e9, activation_gb=activations / 1e9), REPLICAS
    )
    looks = iter(range(LOOKS))
    found = search(prices, STAGES, REPLICAS, 0, lambda: next(looks, None) is not None)
    natural = np.arange(PEERS)
    return {
        "plan": [list(row) for row in found.best.grid],
        "by region": natural.reshape(REPLICAS, STAGES).tolist(),
        "strided": natural.reshape(STAGES, REPLICAS).T.tolist(),
    }


def quiet_s(moves: int) -> float:
    """Seconds without a move after which the live planner has looked again, and found nothing."""
    return 2 * SETTLED_S + AGAIN_S * 2.0 ** max(moves - 1, 0)


def made(folder: Path, options: Any, links: LinkSettings) -> RunDirectory:
    folder.mkdir()
    training = TrainingSettings(
        steps=ENDLESS,
        batch_size=options.microbatches * options.microbatch_size,
        microbatch_size=options.microbatch_size,
        learning_rate=1e-3,
        eval_every=NEVER,
        checkpoint_every=NEVER,
    )
    model = Model(width=options.width, layers=STAGES, sequence_length=SEQUENCE)
    return make_run(folder, model, STAGES, training, options.seed, links)


def seats(run: RunDirectory) -> list[tuple[int, int]]:
    """(pipeline, stage) of the place that each volunteer takes, in the order in which they come: by their
    own rule, from what the coordinator offers.
    """
    config = coordinator_config(run)
    members = Membership(config.layouts, config.costs)
    found = []
    for number in range(PEERS):
        place = choose_place(members.places(), Offered(device=sys.maxsize))
        members.volunteers[str(number)] = volunteer = VolunteerState(str(number), 1, 0.0)
        assert members.claim(volunteer, place.cluster, (place.begin, place.end))
        found.append((place.cluster, members.layout(place.cluster).index((place.begin, place.end))))
    return found


def misplaced(swarm: Swarm, grid: Grid) -> list[str]:
    """Volunteers whose blocks are not those of the order."""
    found = []
    for row in grid:
        for device, wanted in zip(row, sorted(swarm.run.manifest.layouts[0]), strict=True):
            has = swarm.blocks_of(swarm.home(device + 1))
            if has != tuple(wanted):
                found.append(f"volunteer {device + 1} has blocks {has} and not {tuple(wanted)}")
    return found


async def hetpeer(run: RunDirectory, folder: Path, grid: Grid, steps: int) -> list[float]:
    """Seconds of so many steps once everybody is there.

    Volunteers come one after the other, in the order that gives each the place that it has in the grid.
    """
    with Lab(world()) as lab:
        async with running(run, folder, 0, site=Site(lab=lab)) as swarm:
            await arrive(swarm, [grid[pipeline][stage] for pipeline, stage in seats(run)])
            swarm.feed.poll()
            begun = swarm.feed.history.version + 1  # the step in which the last one came
            await swarm.until(begun + steps, WITHIN_S)
            commits = [swarm.feed.history.commits[begun + step] for step in range(steps)]
            if wrong := misplaced(swarm, grid):
                raise SystemExit(f"another order was measured than was meant: {', '.join(wrong)}")
    return [commit["seconds"] for commit in commits]


async def arrive(
    swarm: Swarm, devices: Iterable[int], options: Callable[[int], Sequence[str]] = lambda _device: ()
) -> None:
    """Have them come one after the other, each when the one before has its place; `options` of `join`."""
    for device in devices:
        await swarm.add(device + 1, *options(device))
        async with asyncio.timeout(WITHIN_S):
            while not HAS_A_PLACE.search(swarm.said(device + 1)):
                swarm.check()
                await asyncio.sleep(LOOK_S)


async def by_itself(run: RunDirectory, folder: Path, arrival: Sequence[int], steps: int) -> list[float]:
    """Seconds of so many steps of a swarm to which nobody gave a plan, once it has settled."""
    with Lab(world()) as lab:
        async with running(run, folder, 0, site=Site(lab=lab)) as swarm:
            await arrive(swarm, arrival)
            moves, changed = 0, time.monotonic()
            while time.monotonic() - changed < quiet_s(moves):
                swarm.check()
                await asyncio.sleep(LOOK_S)
                swarm.feed.poll()
                if len(swarm.feed.history.moves) > moves:
                    moves, changed = len(swarm.feed.history.moves), time.monotonic()
            begun = swarm.feed.history.version + 1
            await swarm.until(begun + steps, WITHIN_S)
            commits = [swarm.feed.history.commits[begun + step] for step in range(steps)]
    return [commit["seconds"] for commit in commits]


async def torch_mesh(run: RunDirectory, folder: Path, grid: Grid, steps: int) -> list[float]:
    children = []
    with Lab(world()) as lab:
        nodes = [device + 1 for device in chain.from_iterable(grid)]
        try:
            for rank, node in enumerate(nodes):
                arguments = (run.path, steps, rank, PEERS, STAGES, lab.address(nodes[0]), INTERFACE)
                at = lab.at(node, ())
                children.append(await script("torch_mesh", folder, [*map(str, arguments)], at, rank))
            ends = children.pop(STAGES - 1)  # the last stage of the first pipeline tells
            children.append(ends)
            return (await told(children, steps)).step_s
        finally:
            await end_all(children)


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    example = made(folder / "example", options, LinkSettings())
    grids = {order: grid for order, grid in orders(example).items() if order in options.orders}
    found: dict[Way, list[float]] = {}

    def prepared(way: Way) -> tuple[RunDirectory, Path]:
        place = folder / way.name
        return made(place, options, CODECS[way.codec]), place

    for order, codec in product(grids, options.codecs):
        way = Way("hetpeer", order, codec)
        found[way] = await hetpeer(*prepared(way), grids[order], options.steps)
    for order, codec in product(options.arrivals, options.codecs if BY_ITSELF in options.orders else ()):
        way = Way(BY_ITSELF, order, codec)
        found[way] = await by_itself(*prepared(way), ARRIVALS[order], options.steps)
    for order in [order for order in ("plan", "by region") if order in grids]:
        way = Way("torch", order)
        place = folder / way.name
        place.mkdir()
        found[way] = await torch_mesh(example, place, grids[order], options.steps)
    tokens = options.microbatches * options.microbatch_size * SEQUENCE
    middle = {way: statistics.median(seconds[options.settle :]) for way, seconds in found.items()}
    first, best = next(iter(middle.values())), min(middle[way] for way in middle if way.engine != "torch")
    goals = goals_of(middle)
    return {
        "grids": grids,
        "step_s": {way.name: [round(one, 3) for one in seconds] for way, seconds in found.items()},
        "tokens_per_second": {way.name: round(tokens / seconds) for way, seconds in middle.items()},
        "over_the_first": {way.name: round(seconds / first, 3) for way, seconds in middle.items()},
        "over_the_best": {way.name: round(seconds / best, 3) for way, seconds in middle.items()},
        "goals": goals,
        "met": all(goals.values()),
    }


def goals_of(middle: Mapping[Way, float]) -> dict[str, bool]:
    """Whether the plan is the fastest, and the swarm by itself about as fast; `middle`: seconds of a step."""
    planned = Way("hetpeer", "plan")
    goals = {
        f"the plan is faster than {way.name}": middle[planned] < seconds
        for way, seconds in middle.items()
        if planned in middle and way != planned and way.engine != BY_ITSELF and way.codec == planned.codec
    }
    for way, seconds in middle.items():
        by_hand, torch = Way("hetpeer", "plan", way.codec), Way("torch", "plan")
        if way.engine == BY_ITSELF and by_hand in middle:
            goals[f"{way.name}: at most {NEAR} of {by_hand.name}"] = seconds <= NEAR * middle[by_hand]
            goals[f"{way.name}: {FASTER} times as fast as torch"] = FASTER * seconds <= middle[torch]
    return goals


def show(figures: dict[str, Any]) -> None:
    for way, speed in sorted(figures["tokens_per_second"].items(), key=lambda one: -one[1]):
        times = figures["over_the_first"][way]
        print(f"{way:30} {speed:7,} tokens/s, {times:.2f} times as long as {next(iter(figures['step_s']))}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value, text in (
        ("width", 256, "of the model"),
        ("microbatches", 16, "of a step"),
        ("microbatch-size", 4, "samples"),
        ("settle", 4, "steps that do not count"),
        ("steps", 12, "of each run"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    for name, choices in (("codecs", CODECS), ("arrivals", ARRIVALS)):
        parser.add_argument(f"--{name}", nargs="+", choices=[*choices], default=[*choices])
    parser.add_argument(
        "--orders", nargs="+", choices=ORDERS, default=ORDERS, help="some of them (default: all)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-benchmark-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("eight", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
