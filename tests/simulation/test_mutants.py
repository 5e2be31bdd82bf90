"""Bugs that are put in on purpose are found, so that finding none means something."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.amounts import mostly_proof
from tests.simulation.coverage import Coverage
from tests.simulation.histories import shape, simulate
from tests.simulation.mutants import MUTANTS

QUICK = {
    "parts_as_list": 30,
    "fold_twice": 20,
    "part_forgotten": 20,
    "tied_apart": 20,
    "overlaps_count": 120,
    "dead_still_count": 60,
    "seal_early": 30,
    "old_votes": 60,
    "announce_first": 20,
    "stale_joiner": 20,
}
"""Mutant → histories within which three are to be violations; docs/protocol.md has the whole table."""


def history(name, seed):
    """The history `seed` in which the mutant `name` is to be caught.

    Two of them need histories of their own, for otherwise where the third one comes is chance:
    `seal_early` does harm only if a backward fails that has filled its slot. Of ordinary histories one in 27
    has that (18 of 480); if half of the faults are failing work and a slot has room for one, one in three.
    `old_votes` needs a vote that a newer plan has overtaken: one in 16, and with slow messages and hasty
    plans one in four.
    """
    match name:
        case "seal_early":
            config = dataclasses.replace(shape(seed), slot_capacity=1)
            return simulate(seed, Coverage(), faults=12, failing=0.5, config=config)
        case "old_votes":
            config = dataclasses.replace(shape(seed), reduce_s=1.0, latency_s=(0.005, 0.5))
            return simulate(seed, Coverage(), faults=20, config=config)
        case _:
            return simulate(seed, Coverage(), faults=12)


@pytest.mark.parametrize("name", mostly_proof(QUICK, QUICK.keys() - {"overlaps_count"}))
def test_a_seeded_bug_is_caught_three_times(name):
    caught = []
    for seed in range(QUICK[name]):
        with MUTANTS[name]():
            outcome = history(name, seed)
        if outcome.caught:
            caught.append(seed)
            if len(caught) == 3:
                return
    pytest.fail(f"{name}: caught by {caught} only")


@pytest.mark.parametrize("name", ["seal_early", "old_votes"])
def test_without_the_bug_its_histories_keep_every_invariant(name):
    assert [history(name, seed).violation for seed in range(10)] == [None] * 10


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
