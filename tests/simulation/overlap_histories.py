"""Histories in which steps overlap; in every other one clusters train batches of their own and average, as
Ravnest does.

`python -m tests.simulation.overlap_histories --seed 17` replays one, `--count` runs many. Seeds 2n and 2n + 1
have the same shape: one is a swarm that trains the same step everywhere, in the other one clusters are
founded and fall apart, and average, every other four with delay.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from tests.simulation import histories, sim_grouped
from tests.simulation.coverage import Coverage
from tests.simulation.histories import FAULTS, HistoryOutcome, shape

MOST = 3
"""Staleness, from 1 on."""
STEPS = 16
"""Also batches, of a run with clusters."""
INTERVALS = (2, 4)
"""Batches between averagings, in turn: with one, no step would begin before the last one's averaging is over,
if that is not delayed (test_no_pause.py).
"""
FRESH = 4
"""Steps that do not overlap at first, less than so many in turn."""
NEVER = 100
"""Steps between evaluations: whatever is evaluated begins alone."""


def simulate(
    seed: int, coverage: Coverage, *, faults: int = FAULTS, steps: int = STEPS, by_stage: bool = False
) -> HistoryOutcome:
    """One history; a violation is in the outcome.

    `by_stage`: later stages are less stale, and every other link has room for one or two bundles only.

    `coverage` counts histories without clusters only: clusters have another core.
    """
    shaped, clusters = divmod(seed, 2)
    config = replace(
        shape(shaped),
        steps=steps,
        staleness=1 + shaped // 3 % MOST,
        fresh_steps=shaped // 5 % FRESH,
        evaluate_every=NEVER,
    )
    if shaped // 4 % 2 == 0:
        config = replace(config, head_start=1 + shaped // 8 % config.microbatches)
    if by_stage:
        least, after = shaped % config.staleness, range(len(config.layouts[0]) - 1, -1, -1)
        bounds = [
            (begin, min(config.staleness, least + n))
            for (begin, _), n in zip(config.layouts[0], after, strict=True)
        ]
        config = replace(config, stage_staleness=tuple(bounds), granted_frames=shaped // 2 % 3)
    if clusters:
        several = max(config.volunteers, 2 * len(config.layouts[0]))
        config = replace(config, volunteers=several)
        interval = INTERVALS[shaped // 2 % 2]
        outcome = sim_grouped.simulate(shaped, faults=faults, config=config, interval=interval)
    else:
        outcome = histories.simulate(shaped, coverage, faults=faults, config=config)
    return replace(outcome, seed=seed)


def main() -> int:
    """Command line; exit status 1 if any history breaks an invariant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--by-stage", action="store_true", help="later stages are less stale")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    return histories.tell(
        [
            simulate(seed, Coverage(), faults=options.faults, steps=options.steps, by_stage=options.by_stage)
            for seed in seeds
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
