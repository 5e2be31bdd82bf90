"""Run seeded histories: `python -m hetpeer.peer.simulate.run --seed 17` replays one, `--count` runs many."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from hetpeer.peer.simulate.faults import Faults
from hetpeer.peer.simulate.numerics import Symbols
from hetpeer.peer.simulate.swarm import Coverage, Swarm, SwarmConfig, ViolationError

BLOCKS = 4
FAULTS = 8
FAULT_SPAN_S = 60.0
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one history."""

    seed: int
    violation: str | None
    faults: int
    events: int
    virtual_s: float


def simulate(
    seed: int, coverage: Coverage, *, faults: int = FAULTS, config: SwarmConfig | None = None
) -> Outcome:
    """One history with the symbolic model; never raises for a violation, it is in the outcome."""
    swarm = Swarm(seed, config or shape(seed), Symbols(BLOCKS), coverage)
    Faults(swarm, faults, FAULT_SPAN_S)
    violation: str | None = None
    try:
        swarm.run(LIMIT_S)
    except (ViolationError, AssertionError, KeyError) as error:
        violation = f"{type(error).__name__}: {error}"
    return Outcome(seed, violation, swarm.faults, swarm.world.events, swarm.world.now)


def shape(seed: int) -> SwarmConfig:
    """The swarm's shape varies with the seed: even and uneven cuts, 3 to 6 volunteers, small and large slots."""
    layouts = (
        (((0, 2), (2, 4)),),
        (((0, 2), (2, 4)), ((0, 1), (1, 4))),
        (((0, 1), (1, 3), (3, 4)), ((0, 3), (3, 4))),
        (((0, 4),),),
    )[seed % 4]
    return SwarmConfig(
        volunteers=3 + seed % 4, layouts=layouts, slot_capacity=1 + seed % 3, microbatches=4 + seed % 3
    )


def main() -> int:
    """Command line; exit status 1 if any history breaks an invariant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--faults", type=int, default=FAULTS)
    options = parser.parse_args()
    coverage = Coverage()
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        outcome = simulate(seed, coverage, faults=options.faults)
        if outcome.violation or options.count == 1:
            print(outcome)
        failed += outcome.violation is not None
    print(
        f"{options.count} histories, {failed} violations, {sum(coverage.coordinator.values())} coordinator events"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
