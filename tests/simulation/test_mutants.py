"""Bugs that are put in on purpose are found, so that finding none means something."""

import json
import re
from pathlib import Path

import pytest

from tests.amounts import mostly_proof
from tests.simulation.coverage import Coverage
from tests.simulation.histories import simulate
from tests.simulation.mutant_histories import OWN, mutant_history
from tests.simulation.mutants import MUTANTS

FAULTS = 12
QUICK = {
    "parts_as_list": 30,
    "fold_twice": 20,
    "part_forgotten": 20,
    "tied_apart": 20,
    "overlaps_count": 120,
    "dead_still_count": 60,
    "seal_early": 30,
    "old_votes": 60,
    "fixed_patience": 60,
    "announce_first": 20,
    "stale_joiner": 20,
}
"""Mutant → histories within which three are to be violations; docs/protocol.md has the whole table."""


@pytest.mark.parametrize(
    "name", mostly_proof(QUICK, QUICK.keys() - {"overlaps_count", "fixed_patience", "old_votes"})
)
def test_a_seeded_bug_is_caught_three_times(name):
    caught = []
    for seed in range(QUICK[name]):
        with MUTANTS[name]():
            outcome = mutant_history(name, seed, FAULTS)
        if outcome.caught:
            caught.append(seed)
            if len(caught) == 3:
                return
    pytest.fail(f"{name}: caught by {caught} only")


@pytest.mark.parametrize("name", mostly_proof(OWN, {"seal_early"}))
def test_without_the_bug_its_histories_keep_every_invariant(name):
    assert [mutant_history(name, seed, FAULTS).violation for seed in range(10)] == [None] * 10


def test_a_mutant_leaves_nothing_behind():
    before = simulate(3, Coverage())
    for mutant in MUTANTS.values():
        with mutant():
            pass
    assert simulate(3, Coverage()) == before


def test_the_docs_tell_what_was_measured_of_all_of_them():
    root = Path(__file__).parents[2]
    measured = json.loads((root / "benchmarks" / "results" / "mutants.json").read_text())["mutants"]
    rows = re.findall(
        r"^\| `(\w+)`: .* \| (.*) \| (\d+) \|$", (root / "docs" / "protocol.md").read_text(), re.MULTILINE
    )
    told = {
        name: (", ".join(map(str, one["caught_by"])) or "none", str(one["histories"]))
        for name, one in measured.items()
    }
    assert {name: tuple(row) for name, *row in rows} == told
    assert told.keys() == MUTANTS.keys()
