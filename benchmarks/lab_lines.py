"""Lines of all pairs, as a swarm of real processes knows them after two minutes, against the laboratory.

Volunteers with empty homes join at once, in homes, a city and regions of the world (root), and train a small
model whose bundles are as large as those of a real one. After SETTLE_S a node beside the bootstrap reads all
adverts, and estimates the line between any two of those who take part as the planner does. `unmeasured`:
pairs whose line nobody used. In virtual time, with more peers: benchmarks.coordinates.

    python -m benchmarks.lab_lines
    python -m benchmarks.lab_lines --only regions --volunteers 5
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.coordinates import LATENCY, RATE
from benchmarks.networks import network
from benchmarks.scenarios.measuring import BIT_S, laboratory
from benchmarks.swarm import WITHOUT_END, Model, Site, make_run, running
from hetpeer.dht.discovery import Advert
from hetpeer.peer.planning.advert_lines import lines_of
from tests.swarm.advert_observer import __name__ as observer
from tests.wanlab.lab import ROOT, Lab

WHERE = ("homes", "city", "regions")
SETTLE_S = 120.0
WITHIN_S = 180.0
"""Seconds until all have advertised their first block."""
LOOK_S = 1.0
MODEL = Model(width=256, layers=2, heads=2, sequence_length=512)
"""Bundles of 2 MiB: smaller ones leave before TCP is as fast as a far line, and show nothing of it."""
TRAINING = WITHOUT_END.model_copy(update={"batch_size": 16})


def adverts_in(told: Path) -> dict[str, Advert]:
    """Peer → its last advert that the observer has read."""
    found: dict[str, Advert] = {}
    for line in told.read_text().splitlines():
        entry = json.loads(line)
        if "peer" in entry:
            found[entry.pop("peer")] = Advert.from_map(entry, peer="")
    return found


def nodes_of(adverts: dict[str, Advert]) -> dict[str, int]:
    """Peer → its node in the laboratory: v3 is at node 3, the bootstrap at 0."""
    return {
        peer: 0 if advert.role == "coordinator" else int(advert.name[1:])
        for peer, advert in adverts.items()
        if advert.role == "coordinator" or (advert.block_end and advert.name)
    }


async def all_there(told: Path, volunteers: int) -> None:
    """Return once the bootstrap node and all volunteers with a place have been seen."""
    while True:
        if len(nodes_of(adverts_in(told))) > volunteers:
            return
        await asyncio.sleep(LOOK_S)


async def row(name: str, volunteers: int, seed: int) -> dict[str, Any]:
    """Errors of the estimated lines in one network."""
    with tempfile.TemporaryDirectory() as place, Lab(network(name, volunteers)) as lab:
        folder, told = Path(place), Path(place) / "told"
        run = make_run(folder, MODEL, 2, TRAINING, seed)
        async with running(run, folder, volunteers, site=Site(lab=lab)) as swarm:
            with told.open("w") as out:
                command = (sys.executable, "-m", observer, swarm.address, run.run_id, lab.address(0))
                lab.start(0, command, stdin=subprocess.PIPE, stdout=out, cwd=ROOT)
            async with asyncio.timeout(WITHIN_S):
                await all_there(told, volunteers)
            await asyncio.sleep(SETTLE_S)
            adverts = adverts_in(told)
    return compared(adverts, name, volunteers)


def compared(adverts: dict[str, Advert], name: str, volunteers: int) -> dict[str, Any]:
    """Errors in the middle, as shares of the laboratory's figures."""
    at = nodes_of(adverts)
    there = {peer: adverts[peer] for peer in at}
    lines, nodes = lines_of(there), np.ix_([*at.values()], [*at.values()])
    truth = laboratory(name, volunteers)
    pairs = ~np.eye(len(at), dtype=np.bool_)
    unused = pairs & ~lines.measured & ~lines.measured.T
    latency = np.where(pairs, lines.latency / np.where(pairs, truth.latency_s[nodes], 1.0) - 1.0, 0.0)
    rates = np.where(pairs, truth.bandwidth_gbit_s[nodes] * BIT_S, 1.0)
    rate = np.where(pairs, lines.rate / rates - 1.0, 0.0)
    return {
        "peers": len(at),
        "with_coordinate": sum(bool(advert.coordinate) for advert in there.values()),
        "pairs": int(pairs.sum()),
        "unmeasured": int(unused.sum()),
        "latency": middle(latency, pairs),
        "rate": middle(rate, pairs),
        "latency_unmeasured": middle(latency, unused),
        "rate_unmeasured": middle(rate, unused),
        "off": {"latency": rounded(latency), "rate": rounded(rate)},
    }


def middle(errors: NDArray[np.float64], which: NDArray[np.bool_]) -> float | None:
    """Median of their sizes; None if there are none."""
    return float(np.median(np.abs(errors[which]))) if which.any() else None


def rounded(errors: NDArray[np.float64]) -> list[list[float]]:
    """The matrix as a list, with three digits."""
    return [[round(entry, 3) for entry in line] for line in errors.tolist()]


def show(figures: dict[str, Any]) -> None:
    print("network   peers  pairs  unmeasured  latency  rate    unmeasured: latency, rate")
    for name, one in figures["networks"].items():
        unused = [f"{100 * one[key]:6.1f} %" if one[key] is not None else "-" for key in UNMEASURED]
        print(
            f"{name:<9} {one['peers']:>5} {one['pairs']:>6} {one['unmeasured']:>11}"
            f" {one['latency']:>8.1%} {one['rate']:>6.1%}  {unused[0]:>12} {unused[1]:>10}"
        )
    report.show_goals(figures["goals"])


UNMEASURED = ("latency_unmeasured", "rate_unmeasured")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--only", nargs="*", default=list(WHERE), choices=list(WHERE), help="networks")
    parser.add_argument("--volunteers", type=int, default=5)
    options = parser.parse_args()
    rows = {name: asyncio.run(row(name, options.volunteers, options.seed)) for name in options.only}
    goals = {
        f"{name}: latency within {LATENCY:.0%}, rate within {RATE:.0%} in the middle": (
            one["latency"] <= LATENCY and one["rate"] <= RATE
        )
        for name, one in rows.items()
    }
    name = "lab-lines" if options.only == list(WHERE) else "lab-lines-some"
    figures = {"seconds": SETTLE_S, "networks": rows, "goals": goals, "met": all(goals.values())}
    return report.finish(name, figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
