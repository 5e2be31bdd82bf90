"""Seeded histories with faults: no invariant breaks, every run ends, and every cell of the coordinator is reached."""

import pytest

from hetpeer.peer.simulate.coverage import Coverage
from hetpeer.peer.simulate.run import simulate

MOST_HISTORIES = 1200


@pytest.mark.parametrize("first", range(1000, 1200, 50))
def test_no_violation(first: int) -> None:
    outcomes = [simulate(seed, Coverage()) for seed in range(first, first + 50)]
    assert [outcome for outcome in outcomes if outcome.violation] == []
    assert sum(outcome.faults for outcome in outcomes) >= 50 * 8


def test_every_state_of_the_coordinator_meets_every_event() -> None:
    coverage = Coverage()
    for seed in range(MOST_HISTORIES):
        assert simulate(seed, coverage).violation is None, seed
        if not coverage.unreached_coordinator():
            return
    pytest.fail(f"not reached: {sorted(coverage.unreached_coordinator())}")
