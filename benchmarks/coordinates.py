"""Lines of all pairs, estimated from few measurements, against the truth; in virtual time.

Each peer pings those that its probe meets, and one more at random in each of ROUNDS rounds: with a round in
five seconds, two minutes. Rates are those of probes, and of four lines of each that were used. Errors are
those of the pairs that nobody measured, in the middle; `by the ends` is what a rate counted as before there
were estimates by the way. DT-FM's five networks, the laboratory's three, and two kinds with seeds that no
constant was chosen by (scenarios/measuring.py). `uncertain` ones have goals for nothing: in `cities` a fifth
(latency) and a third (rate) of every single pair is chance, and `random` is nothing else.

    python -m benchmarks.coordinates
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks import report
from benchmarks.scenarios.measuring import UNSEEN, after, laboratory, unseen
from benchmarks.scenarios.networks import BEST, dt_fm, uneven
from hetpeer.stages.planning.device_network import DeviceNetwork

ROUNDS = 24
HALF = ROUNDS // 2
LATENCY, RATE = 0.10, 0.20
"""Errors in the middle that are allowed."""
LIARS = 6
"""Liars among 64 peers."""
SEEDS = 2
UNSEEN_SEED = 100
"""First seed of the networks that nobody had looked at."""
UNCERTAIN = ("cities", "random")
NETWORKS: dict[str, Callable[[int], DeviceNetwork]] = {
    **{f"DT-FM {case}": lambda _seed, case=case: dt_fm(case) for case in BEST},
    "homes": lambda _seed: laboratory("homes", 7),
    "city": lambda _seed: laboratory("city", 7),
    "regions": lambda _seed: laboratory("regions", 7),
    **{kind: lambda seed, kind=kind: unseen(kind, UNSEEN_SEED + seed) for kind in UNSEEN},
    **{f"{kind} (uncertain)": lambda seed, kind=kind: uneven(kind, seed) for kind in UNCERTAIN},
}


def row(make: Callable[[int], DeviceNetwork], seed: int) -> dict[str, Any]:
    """The figures of one network."""
    network = make(seed)
    found = {rounds: after(network, rounds, seed) for rounds in (HALF, ROUNDS)}
    lied = after(network, ROUNDS, seed, liars=max(1, LIARS * len(network) // 64))
    whole = found[ROUNDS]
    return {
        "seed": seed,
        "pings": whole.pings,
        "latency": whole.medians()[0],
        "rate": whole.medians()[1],
        "rate_by_ends": float(sorted(whole.by_ends)[len(whole.by_ends) // 2]),
        "latency_half_time": found[HALF].medians()[0],
        "rate_half_time": found[HALF].medians()[1],
        "latency_with_liars": lied.medians()[0],
        "rate_with_liars": lied.medians()[1],
    }


def worst(rows: list[dict[str, Any]], what: str) -> float:
    return max(one[what] for one in rows)


def show(figures: dict[str, Any]) -> None:
    print("network                latency  rate  by the ends  half time: latency, rate  liars: latency, rate")
    for name, rows in figures["networks"].items():
        print(
            f"{name:<22} {worst(rows, 'latency'):6.1%} {worst(rows, 'rate'):6.1%}"
            f" {worst(rows, 'rate_by_ends'):11.1%} {worst(rows, 'latency_half_time'):14.1%}"
            f" {worst(rows, 'rate_half_time'):8.1%} {worst(rows, 'latency_with_liars'):16.1%}"
            f" {worst(rows, 'rate_with_liars'):7.1%}"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    options = report.parser(__doc__ or "").parse_args()
    seeds = range(options.seed, options.seed + SEEDS)
    rows = {name: [row(make, seed) for seed in seeds] for name, make in NETWORKS.items()}
    goals = {
        f"{name}: latency within {LATENCY:.0%}, rate within {RATE:.0%} in the middle": (
            worst(some, "latency") <= LATENCY and worst(some, "rate") <= RATE
        )
        for name, some in rows.items()
        if "uncertain" not in name
    }
    figures = {"rounds": ROUNDS, "networks": rows, "goals": goals, "met": all(goals.values())}
    return report.finish("coordinates", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
