"""How much of a line tensors fill, and what that costs: our streams beside plain TCP, TLS 1.3 and
hivemind's own calls.

In the laboratory (root), two nodes, one direction. Goodput is payload over time, from the difference of a
long and a short transfer, so that neither the start nor the last acknowledgement counts. The ways take turns;
figures are medians of rounds. CPU seconds are those of both ends with their p2pd.

    python -m benchmarks.links
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from tests.wanlab.lab import ROOT, Lab

KIB, MIB = 1 << 10, 1 << 20
LINES = (
    (20, 5, (256 * KIB, 1 * MIB)),
    (100, 5, (1 * MIB, 4 * MIB)),
    (1000, 2, (4 * MIB, 16 * MIB)),
    (100, 50, (1 * MIB, 4 * MIB, 16 * MIB)),
)
"""Mbit/s, one-way latency in ms, bytes of a tensor."""
WAYS: dict[str, dict[str, Any]] = {
    "tcp": {"way": "tcp"},
    "tls": {"way": "tls"},
    "1 lane": {"way": "lanes", "lanes": 1},
    "3 lanes": {"way": "lanes", "lanes": 3},
    "hivemind unary": {"way": "whole"},
    "hivemind 64 KiB stream": {"way": "pieces"},
}
MOST_UNARY = 2 * MIB
"""Above this hivemind streams by itself (MAX_UNARY_PAYLOAD_SIZE)."""
LONG_S = 4.0
"""Least seconds of the long transfer, at the link's rate."""
CPU_OF_TLS = 2.5
"""CPU seconds a gigabyte of 3 lanes over those of TLS over TCP, which encrypts as well: at most so many
times.
"""
GOALS = {5: 0.97, 2: 0.97, 50: 0.93}
"""One-way latency -> share of TCP's goodput that 3 lanes are to reach."""


class Ends:
    """A sender and a receiver on a line that can be changed."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab = lab
        self._folder = folder
        self.lost_answers = 0
        """Of hivemind, which were asked for again."""
        self._taker, said = self._start(1)
        self._sender, _ = self._start(0, said["address"], said["hivemind"])

    def _start(self, node: int, *more: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        folder = self._folder / str(node)
        folder.mkdir()
        process = self._lab.start(
            node,
            [
                sys.executable,
                "-P",
                str(ROOT / "benchmarks" / "linkpeer.py"),
                str(folder),
                self._lab.address(node),
                *more,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        return process, json.loads(process.stdout.readline())

    def line(self, mbps: float, latency_ms: float) -> None:
        for node in (0, 1):
            self._lab.order(f"uplink {node} {mbps}")
        self._lab.order(f"latency 0 1 {latency_ms}")

    def transfer(self, way: dict[str, Any], nbytes: int, tensors: int) -> tuple[float, float]:
        """Seconds, and CPU seconds of both ends."""
        before = self._cpu()
        order = {**way, "bytes": nbytes, "tensors": tensors}
        self._sender.stdin.write(json.dumps(order) + "\n")
        self._sender.stdin.flush()
        said = json.loads(self._sender.stdout.readline())
        self.lost_answers = said["lost_answers"]
        return said["seconds"], self._cpu() - before

    def _cpu(self) -> float:
        total = 0.0
        for process in (self._taker, self._sender):
            top = psutil.Process(process.pid)
            for one in (top, *top.children(recursive=True)):
                times = one.cpu_times()
                total += times.user + times.system
        return total


def rated(ends: Ends, way: dict[str, Any], mbps: float, nbytes: int) -> tuple[float, float]:
    """Goodput as a share of the line as it is set, and CPU seconds a gigabyte."""
    line = mbps * 125_000
    short = max(4, int(1.0 * line / nbytes))
    long = short + max(8, int(LONG_S * line / nbytes))
    first = ends.transfer(way, nbytes, short)
    second = ends.transfer(way, nbytes, long)
    payload = (long - short) * nbytes
    return payload / (second[0] - first[0]) / line, (second[1] - first[1]) / payload * 1e9


def measure(ends: Ends, rounds: int, mbps: int, latency_ms: int, nbytes: int) -> dict[str, Any]:
    """Goodput as a share of the line, and CPU seconds a gigabyte, of each way."""
    ends.line(mbps, latency_ms)
    ways = {n: w for n, w in WAYS.items() if w["way"] != "whole" or nbytes <= MOST_UNARY}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(rated(ends, way, mbps, nbytes))
    row: dict[str, Any] = {"mbps": mbps, "latency_ms": latency_ms, "bytes": nbytes}
    for name, values in found.items():
        goodput, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        row[name] = {"goodput": goodput, "cpu_s_per_gb": cpu, "all": [round(value, 4) for value, _ in values]}
    row["of_tcp"] = row["3 lanes"]["goodput"] / row["tcp"]["goodput"]
    row["cpu_of_tls"] = row["3 lanes"]["cpu_s_per_gb"] / row["tls"]["cpu_s_per_gb"]
    return row


def tell(row: dict[str, Any]) -> None:
    ways = ", ".join(
        f"{n} {row[n]['goodput']:.3f} ({row[n]['cpu_s_per_gb']:.1f} s/GB)" for n in WAYS if n in row
    )
    where = f"{row['mbps']} Mbit/s, {2 * row['latency_ms']} ms there and back, {row['bytes'] // KIB} KiB"
    ours = f"3 lanes are {row['of_tcp']:.3f} of TCP and cost {row['cpu_of_tls']:.2f} of TLS"
    print(f"{where}: {ways}; {ours}", flush=True)


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one cell, once, kept nowhere: does it work?")
    options = parser.parse_args()
    rounds, lines = (1, ((1000, 2, (4 * MIB,)),)) if options.quick else (options.rounds, LINES)
    rows = []
    with tempfile.TemporaryDirectory() as folder, Lab({"nodes": 2, "queue_ms": 100}) as lab:
        ends = Ends(lab, Path(folder))
        for mbps, latency_ms, sizes in lines:
            for nbytes in sizes:
                rows.append(measure(ends, rounds, mbps, latency_ms, nbytes))
                if not options.json:
                    tell(rows[-1])
        late = lab.stats()["late_us"]
    met = all(row["of_tcp"] >= GOALS[row["latency_ms"]] for row in rows)
    cheap = all(row["cpu_of_tls"] <= CPU_OF_TLS for row in rows)
    figures = {
        "rounds": rounds,
        "router_late_us": late,
        "rows": rows,
        "hivemind_lost_answers": ends.lost_answers,
        "met": met,
        "cpu_met": cheap,
    }
    document = figures if options.quick else report.keep("links", figures, seed=options.seed)
    if options.json:
        print(json.dumps(document))
    else:
        print(f"goal: 0.97 of TCP, 0.93 with 100 ms there and back: {'met' if met else 'MISSED'}")
        print(f"goal: CPU a gigabyte at most {CPU_OF_TLS} of TLS over TCP: {'met' if cheap else 'MISSED'}")
    return 0 if met and cheap else 1


if __name__ == "__main__":
    sys.exit(main())
