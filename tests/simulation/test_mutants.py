"""The simulator finds seeded bugs: each of these is caught by at least three seeds."""

import pytest

from hetpeer.peer.simulate.coverage import Coverage
from hetpeer.peer.simulate.mutants import MUTANTS
from hetpeer.peer.simulate.run import simulate

MOST_HISTORIES = 150
CAUGHT_SOON = (
    "parts_as_list",
    "fold_twice",
    "dead_still_count",
    "announce_first",
    "overlaps_count",
    "old_votes",
    "seal_early",
    "steps_by_number",
    "fixed_patience",
)


@pytest.mark.parametrize("name", CAUGHT_SOON)
def test_mutant_is_caught_by_three_seeds(name: str) -> None:
    caught = []
    for seed in range(MOST_HISTORIES):
        with MUTANTS[name]():
            if simulate(seed, Coverage()).violation:
                caught.append(seed)
        if len(caught) == 3:
            return
    pytest.fail(f"{name}: caught by seeds {caught} of {MOST_HISTORIES}")
