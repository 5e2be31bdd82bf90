"""Is anybody honest ever banned, by spot checks or for what others say of reduces? Simulated swarms of honest
volunteers under faults, until they have made so many contributions.

Each seed is another swarm (tests/simulation/histories.py has its shapes) of eight volunteers, of whose
contributions a fifth is checked: they die, freeze, leave, lose their lines and come back, the coordinator
too; steps overlap, links are narrow, volunteers are moved. Every invariant of the simulator is watched as
ever. A contribution is what one volunteer counts in one committed step.

    make proof-10
    python -m benchmarks.honest --contributions 100000 --seed 1000
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import report
from hetpeer.bootstrap.trust.step_spot_checks import StepSpotChecks
from tests.simulation.arrangements import Arrangements
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.coverage import Coverage
from tests.simulation.faults import Faults
from tests.simulation.histories import BLOCKS, LIMIT_S, shape

SHARE = 0.2
VOLUNTEERS = 8
"""With four blocks in one to four stages: enough that there is somebody to check, and a third to decide."""
NARROW = 2
"""Bundles that a link has room for, in every third swarm."""


@dataclass(slots=True)
class Tally:
    """Results of the histories so far."""

    histories: int = 0
    faults: int = 0
    contributions: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    """Verdict → how many ended with it."""
    bans: list[dict[str, Any]] = field(default_factory=list)
    disputes: list[dict[str, Any]] = field(default_factory=list)
    pairs_in_dispute: int = 0
    """Pairs of whom one has waited for the other in vain, or could not add what it sent: lines break, and
    parts are spoilt.
    """
    broken: dict[int, str] = field(default_factory=dict)
    """Seed → the invariant and how."""

    def count_checks(self) -> None:
        """Every spot check that ends from now on."""
        take = StepSpotChecks.take

        def taken(checks: StepSpotChecks) -> Any:
            ended = take(checks)
            self.checks.update(check.outcome.verdict.value for check in ended)
            return ended

        StepSpotChecks.take = taken  # type: ignore[method-assign]

    def add(self, seed: int, faults: int) -> None:
        """One more history."""
        frames = 0 if seed % 3 else NARROW
        config = replace(shape(seed), volunteers=VOLUNTEERS, check_share=SHARE, granted_frames=frames)
        swarm = CheckedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage())
        Faults(swarm, faults)
        if config.arranged_s:
            Arrangements(swarm, seed, config.arranged_s)
        try:
            swarm.run(LIMIT_S)
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            self.broken[seed] = f"{type(error).__name__}: {error}"
        self.histories += 1
        self.faults += swarm.faults
        for record in swarm.log:
            match record["kind"]:
                case "commit":
                    self.contributions += len(record["counted"]) // 2  # a number and an amount for each
                case "banned":
                    self.bans.append({"seed": seed, **record})
                case "quarrel":
                    self.pairs_in_dispute += record["of"]
                case "dispute":
                    self.disputes.append({"seed": seed, **record})
                case _:
                    pass


def measure(options: Any) -> dict[str, Any]:
    tally, began, seed = Tally(), time.process_time(), options.seed
    tally.count_checks()
    while tally.contributions < options.contributions:
        tally.add(seed, options.faults)
        seed += 1
    goals = {
        "nobody banned": not tally.bans,
        "no invariant broken": not tally.broken,
        "something checked": tally.checks["passed"] > 0,
    }
    return {
        "share": SHARE,
        "volunteers": VOLUNTEERS,
        "histories": tally.histories,
        "faults": tally.faults,
        "contributions": tally.contributions,
        "checks": dict(tally.checks),
        "bans": tally.bans,
        "disputes": tally.disputes,
        "quarrels": tally.pairs_in_dispute,
        "violations": [{"seed": seed, "why": why} for seed, why in tally.broken.items()],
        "processor_s": round(time.process_time() - began, 1),
        "goals": goals,
        "met": all(goals.values()),
    }


def show(figures: dict[str, Any]) -> None:
    checks = ", ".join(f"{count} {verdict}" for verdict, count in sorted(figures["checks"].items()))
    print(
        f"{figures['contributions']} contributions in {figures['histories']} histories with "
        f"{figures['faults']} faults;"
        f" checks: {checks or 'none'}; {len(figures['bans'])} bans, {len(figures['disputes'])} disputes,"
        f" {figures['quarrels']} pairs in dispute"
    )
    for one in (*figures["bans"], *figures["disputes"], *figures["violations"]):
        print(f"  {one}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument(
        "--contributions", type=int, default=10_000, help="go on until so many were made (default: 10000)"
    )
    parser.add_argument("--faults", type=int, default=10, help="of each history (default: 10)")
    options = parser.parse_args()
    return report.finish("honest", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
