"""Histories in which a seeded bug can do harm, if ordinary ones seldom let it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.simulation.coverage import Coverage
from tests.simulation.histories import HistoryOutcome, shape, simulate

OWN: Mapping[str, Mapping[str, Any]] = {
    "seal_early": {"slot_capacity": 1},
    "old_votes": {"reduce_s": 1.0, "latency_s": (0.005, 0.5)},
    "fixed_patience": {"reduce_s": 1.0, "latency_s": (0.2, 0.5)},
    "one_entry": {"stall_s": 0.5, "latency_s": (0.005, 0.02)},
}
"""Shape of the swarm for each of these bugs. In ordinary histories it is chance where the third catch comes.

`seal_early` does harm only if a backward fails that has filled its slot. Of ordinary histories one in 27 has
that (18 of 480); if half of the faults are failing work and a slot has room for one, one in three.
`old_votes` needs a vote that a newer plan has overtaken: one in 16, and with slow messages and hasty plans
one in four. `fixed_patience` needs a time-out that is shorter than a message takes: one in 100, and with slow
messages and hasty plans one in six.
`one_entry` needs a volunteer that leaves a step while its worker computes and enters it again before that is
done: one in 170, and one in 20 if volunteers soon take each other for stalled.
"""
FAILING = {"seal_early": 0.5}


def mutant_history(name: str, seed: int, faults: int) -> HistoryOutcome:
    """The history `seed` in which the bug `name` is to be caught."""
    config = dataclasses.replace(shape(seed), **OWN.get(name, {}))
    return simulate(seed, Coverage(), faults=faults, failing=FAILING.get(name, 0.0), config=config)
