"""The first advert of a newcomer, before it has a place, against the laboratory's truth.

A volunteer with an empty home joins over one line after the other (root). Another node of the DHT reads its
adverts meanwhile. The first one that says what is offered has to come before the volunteer has a place, with
all fields, and with uplink and downlink within a fifth of what the laboratory carries. Bytes are those of the
probe by its own count, and all that the laboratory carried for that node until then, heads, DHT and the
beginning of the fetched state included.

    python -m benchmarks.firstplace
    python -m benchmarks.firstplace --only home adsl
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.swarm import WITHOUT_END, Model, Site, Swarm, make_run, running
from hetpeer.peer.probing.kept_line import FILE
from hetpeer.peer.probing.line_estimate import FAR_S
from hetpeer.peer.probing.line_probe import BYTES, LONGEST_S
from hetpeer.peer.process.hetpeer_children import end_all
from tests.wanlab.lab import ROOT, Lab

MBIT = 125e3
OBSERVER = "tests.swarm.advert_observer"
WITHIN_S, LOOK_S = 120.0, 0.05
NEAR = 0.2
"""Error of a rate that is allowed, as a share of the laboratory's."""
GOAL = "home"
"""The line for which the goals are."""
RATES = ("uplink", "downlink")
FIELDS = ("memory_bytes", "device", *RATES, "flops_per_second", "coordinate")
"""Fields of the first advert on a machine without a GPU."""


@dataclass(frozen=True, slots=True)
class Line:
    """Rates of a line in Mbit/s, and the way to everybody else, one way, in ms."""

    up: float
    down: float
    ms: float


LINES = {
    "home": Line(20, 100, 12),
    "adsl": Line(1, 16, 20),
    "cable": Line(10, 250, 15),
    "fibre": Line(300, 1000, 3),
    "mobile": Line(10, 30, 40),
    "far": Line(20, 100, 70),
    "other side of the world": Line(20, 100, 140),
}
EVERYBODY = Line(1000, 1000, 0)


def laboratory(lines: Sequence[Line]) -> dict[str, Any]:
    """Arguments of Lab: the bootstrap node, each of `lines`, and the node that reads adverts."""
    every = [EVERYBODY, *lines, EVERYBODY]
    return {
        "nodes": len(every),
        "latency_ms": [[0.5 + max(a.ms, b.ms) if a is not b else 0.5 for b in every] for a in every],
        "uplink_mbps": [line.up for line in every],
        "downlink_mbps": [line.down for line in every],
        "queue_ms": 150,
    }


async def first_advert(told: Path, name: str) -> Mapping[str, Any]:
    """The first advert of `name` that another node has read and that says what is offered."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            for advert in adverts_in(told):
                if advert.get("name") == name and advert.get("memory_bytes"):
                    return advert
            await asyncio.sleep(LOOK_S)


def adverts_in(told: Path) -> list[dict[str, Any]]:
    """Adverts that the other node has read so far, in order."""
    return [json.loads(line) for line in told.read_text().splitlines()]


async def one(swarm: Swarm, lab: Lab, told: Path, number: int, line: Line) -> dict[str, Any]:
    """A row of the table: the newcomer at node `number`."""
    await swarm.add(number)
    advert = await first_advert(told, f"v{number}")
    pairs = lab.stats()["pair_bytes"]
    carried = sum(pairs[number]) + sum(row[number] for row in pairs)
    child = swarm.volunteers.pop(number)
    kept = json.loads((swarm.home(number) / FILE).read_text())
    took = re.findall(r"a probe of ([0-9.]+) s", (swarm.home(number) / "daemon.log").read_text())
    await end_all([child])
    rates = {}
    for way, true in (("uplink", line.up), ("downlink", line.down)):
        found = advert.get(way, 0) / MBIT
        rates[way] = {"true": true, "found": round(found, 2), "off": round(found / true - 1, 3)}
        rates[way]["said_error"] = round(kept[f"{way}_error"], 3)
    return {
        **rates,
        "trip_ms": {"true": 2 * (line.ms + 0.5), "found": round(1e3 * kept["trip_s"], 1)},
        "fields": [field for field in FIELDS if advert.get(field)],
        "before_a_place": not advert.get("block_end"),
        "probe_bytes": kept["probed_bytes"],
        "carried_bytes": carried,
        "probe_s": float(took[-1]) if took else None,
    }


async def measured(names: Sequence[str], seed: int) -> dict[str, Any]:
    """Rows by the name of the line."""
    rows = {}
    lines = [LINES[name] for name in names]
    with tempfile.TemporaryDirectory() as place, Lab(laboratory(lines)) as lab:
        folder, told = Path(place), Path(place) / "told"
        run = make_run(folder, Model(width=64, layers=2, heads=2), 1, WITHOUT_END, seed)
        async with running(run, folder, 0, site=Site(lab=lab)) as swarm:
            where = (swarm.address, run.run_id, lab.address(len(lines) + 1))
            with told.open("w") as out:
                command = (sys.executable, "-m", OBSERVER, *where)
                lab.start(len(lines) + 1, command, stdin=subprocess.PIPE, stdout=out, cwd=ROOT)
            for number, (name, line) in enumerate(zip(names, lines, strict=True), 1):
                rows[name] = await one(swarm, lab, told, number, line)
    return rows


def goals(rows: Mapping[str, Any]) -> dict[str, bool]:
    """Goal → whether it is met, for the line GOAL where it was measured; bytes and time for all."""
    met = {
        f"at most {BYTES:,} bytes and {LONGEST_S:g} s a probe": all(
            row["probe_bytes"] <= BYTES and (row["probe_s"] or 0.0) <= LONGEST_S + 0.2
            for row in rows.values()
        ),
        f"all fields, before there is a place (rates: up to {1e3 * FAR_S:g} ms there and back)": all(
            row["before_a_place"] and {*FIELDS} <= {*row["fields"], *(RATES if is_far(row) else ())}
            for row in rows.values()
        ),
    }
    if GOAL in rows:
        off = [abs(rows[GOAL][way]["off"]) for way in ("uplink", "downlink")]
        met[f"a {GOAL} line within {NEAR:.0%}"] = max(off) <= NEAR
    return met


def is_far(row: Mapping[str, Any]) -> bool:
    """Whether a probe may find no rates over that line (line_estimate.py)."""
    return bool(row["trip_ms"]["true"] > 1e3 * FAR_S)


def show(figures: dict[str, Any]) -> None:
    print("line                      uplink            downlink          round trip  bytes       s")
    for name, row in figures["lines"].items():
        ways = "  ".join(
            f"{row[way]['found']:6.1f} of {row[way]['true']:<4g} ± {row[way]['said_error']:<4.0%}"
            for way in ("uplink", "downlink")
        )
        trip = f"{row['trip_ms']['found']:.0f} of {row['trip_ms']['true']:g} ms"
        print(f"{name:<25} {ways}  {trip:<13} {row['probe_bytes']:>9,}  {row['probe_s']}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--only", nargs="*", default=list(LINES), choices=list(LINES), help="lines")
    options = parser.parse_args()
    rows = asyncio.run(measured(options.only, options.seed))
    met = goals(rows)
    name = "firstplace" if options.only == list(LINES) else "firstplace-some"
    return report.finish(name, {"lines": rows, "goals": met, "met": all(met.values())}, options, show)


if __name__ == "__main__":
    sys.exit(main())
