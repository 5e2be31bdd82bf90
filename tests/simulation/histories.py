"""Seeded histories: `python -m tests.simulation.histories --seed 17` replays one, `--count` runs many."""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetpeer.averaging.reduce.reduce_shards import LENGTH
from hetpeer.averaging.reduce.tied_parameters import Tie
from hetpeer.bootstrap.log.history import Means
from tests.simulation.arrangements import Arrangements
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedNumerics, CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.faults import Faults

BLOCKS = 4
FAULTS = 10
LIMIT_S = 900.0
"""Virtual seconds after which an unfinished history hangs; most take 30 to 150."""

LAYOUTS: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = (
    (((0, 4),),),
    (((0, 2), (2, 4)),),
    (((0, 2), (2, 4)), ((0, 1), (1, 4))),
    (((0, 1), (1, 3), (3, 4)), ((0, 3), (3, 4))),
    (((0, 1), (1, 2), (2, 3), (3, 4)), ((0, 4),)),
)


@dataclass(frozen=True, slots=True)
class HistoryOutcome:
    """Result of one history."""

    seed: int
    violation: str | None
    faults: int
    events: int
    virtual_s: float
    kinds: frozenset[str]
    """Kinds of records in its log."""
    overlapped: int
    """Committed steps that began before the step before them was committed."""
    across: int
    """Committed steps that began before a mean that was installed before their own update."""

    @property
    def caught(self) -> bool:
        """Whether a seeded bug has broken an invariant.

        Raises TypeError if the bug's patch does not fit what it patches, which proves nothing.
        """
        if self.violation is not None and self.violation.startswith("TypeError"):
            raise TypeError(self.violation)
        return self.violation is not None

    @classmethod
    def of(cls, seed: int, violation: str | None, swarm: CheckedSwarm) -> HistoryOutcome:
        """Result of the history of `swarm`."""
        kinds = frozenset(record["kind"] for record in swarm.log)
        steps = [record for record in swarm.log if record["kind"] == "commit"]
        behind = [record.get("behind", 0) for record in steps]
        updates = updates_behind(swarm.log)
        overlapped = sum(versions > 0 for versions in behind)
        across = sum(versions > stale for versions, stale in zip(behind, updates, strict=True))
        world = swarm.world
        return cls(seed, violation, swarm.faults, world.events, world.now, kinds, overlapped, across)


def updates_behind(log: Sequence[Mapping[str, Any]]) -> list[int]:
    """By how many updates the parameters of each committed step were behind, in the log's order."""
    means = Means(log)
    return [
        means.updates_behind(
            record.get("cluster", 0), record["view"], record["step"], record.get("behind", 0)
        )
        for record in log
        if record["kind"] == "commit"
    ]


TIES = (Tie(uses=((0, 10, 60), (BLOCKS - 1, 40, 90))),)
"""An embedding and a head that share half of their elements."""


def simulate(
    seed: int,
    coverage: Coverage,
    *,
    faults: int = FAULTS,
    failing: float = 0.0,
    config: HistoryConfig | None = None,
    numerics: CheckedNumerics | None = None,
) -> HistoryOutcome:
    """One history, with the symbolic model by default; a violation is not raised, it is in the outcome.

    `failing`: share of the faults that are failing work, besides those that are so by chance.
    """
    swarm = CheckedSwarm(seed, config or shape(seed), numerics or CheckedSymbols(BLOCKS), coverage)
    Faults(swarm, faults, failing=failing)
    if swarm.config.arranged_s:
        Arrangements(swarm, seed, swarm.config.arranged_s)
    violation: str | None = None
    try:
        swarm.run(LIMIT_S)
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        violation = f"{type(error).__name__}: {error}"
    return HistoryOutcome.of(seed, violation, swarm)


def shape(seed: int) -> HistoryConfig:
    """The swarm's shape varies with the seed: stages and cuts, volunteers, slots, latency, patience; every
    other one has uneven uplinks, and shards that are parts of a share, and steps that overlap; in one of
    four volunteers are moved.
    """
    choose = random.Random(seed)
    layouts = choose.choice(LAYOUTS)
    stages = len(layouts[0])
    return HistoryConfig(
        volunteers=choose.randint(max(2, stages), 7),
        layouts=layouts,
        slot_capacity=choose.choice((1, 2, 3, 6)),
        ties=choose.choice(((), TIES)),
        microbatches=choose.randint(4, 8),
        latency_s=(0.005, choose.choice((0.02, 0.12, 0.5))),
        stall_s=choose.choice((0.5, 8.0)),
        reduce_s=choose.choice((1.0, 6.0)),
        sync_s=choose.choice((2.0, 10.0)),
        uplinks=((0.0,), (1.0, 5.0, 2.0, 20.0))[seed % 2],
        shard_length=(LENGTH, 20)[seed % 2],
        arranged_s=choose.choice((0.0, 0.0, 0.0, 5.0)),
        staleness=choose.choice((0, 0, 1, 2)),
        evaluate_every=choose.choice((2, 3, 100)),
    )


def main() -> int:
    """Command line; exit status 1 if any history breaks an invariant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument(
        "--granted-frames", type=int, default=0, help="bundles that a link has room for (default: any)"
    )
    options = parser.parse_args()
    outcomes = [
        simulate(
            seed,
            Coverage(),
            faults=options.faults,
            config=dataclasses.replace(shape(seed), granted_frames=options.granted_frames),
        )
        for seed in range(options.seed, options.seed + options.count)
    ]
    return tell(outcomes)


def tell(outcomes: Sequence[HistoryOutcome]) -> int:
    """Print the result of one, or the broken ones of many. Returns the exit status."""
    broken = [outcome for outcome in outcomes if outcome.violation]
    for outcome in outcomes if len(outcomes) == 1 else broken:
        print(outcome)
    injected = sum(outcome.faults for outcome in outcomes)
    print(f"{len(outcomes)} histories, {injected} faults, {len(broken)} violations")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
